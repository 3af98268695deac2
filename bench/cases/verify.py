"""Seconds of the proof at the first step: of a model of 29 M parameters, and of a shape of 7 B in a small model.

The model is trained on one rank with recomputation. *share* is the proof over the first hundred steps. The large shape
has no values; its small form is made, and trained over two tensor ranks that are threads. The model of JAX spends its
proof on the compilation of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import polyaccel
from bench.runner import Option, begin, parse, table
from bench.training import ADAMW, Gpt, Trainer, draw_batch, engine_trainer, load_corpus, transformers_loss
from polyaccel.comm.init.threads import run_threads
from polyaccel.torch.verify.first_step import FirstStepProof
from polyaccel.torch.verify.shrunk_model import ShrunkModel

_MOST_SHARE, _MOST_SECONDS = 0.02, 5.0
_LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


_seconds: dict[int, float] = {}
"""Of the last proof, by the thread of its rank."""


def _conclude(self: FirstStepProof, engine: Any, proof: Any, seconds: float) -> None:
    assert proof.is_proven, proof.findings[:3]
    _seconds[get_ident()] = seconds


def main(argv: Sequence[str]) -> int:
    """Return 1 where a proof costs more than its limit, or shows nothing."""
    options = {"steps": Option(8, "steps that are timed"), "micro_batch": Option(8, "samples of a step")}
    args = parse("verify", __doc__ or "", {**options, "size": Option("29m", "of the GPT")}, argv)
    begin()
    with patch.object(FirstStepProof, "_conclude", _conclude):
        proof_s, step_s = _of_gpt(args.size, args.steps, args.micro_batch)
        build_s, large_s, numel = _of_7b()
    share = proof_s / (100 * step_s)
    jax_s, jax_step_s = _of_jax(args.steps)
    rows = [
        ("JAX, 29 M, units recomputed", f"{jax_s:.2f}", f"{jax_step_s:.3f}", f"{jax_s / jax_step_s:.2f} %"),
        (f"{args.size}, recomputation", f"{proof_s:.2f}", f"{step_s:.3f}", f"{100 * share:.2f} %"),
        (f"7 B on meta, tensor 2: {numel / 1e6:.1f} M made in {build_s:.2f} s", f"{large_s:.2f}", "-", "-"),
    ]
    table("Proofs at the first step", ("training", "proof s", "step s", "share of 100 steps"), rows)
    return int(share > _MOST_SHARE or build_s + large_s > _MOST_SECONDS)


def _of_gpt(size: str, steps: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds of the proof, and of a step."""
    corpus, seconds = load_corpus(), list[float]()
    model = Gpt(size)
    config = {"activation_checkpointing": {"enabled": True}}

    def train(trainer: Trainer) -> None:
        for step in range(steps + 1):
            began_s = perf_counter()
            trainer.step(*draw_batch(corpus, step, 0, micro_batch))
            seconds.append(perf_counter() - began_s)

    return _proven(model, config, micro_batch, train), median(seconds[1:])


def _of_jax(steps: int) -> tuple[float, float]:
    """Return the seconds of the proof of the examples' GPT of JAX, and of a step."""
    from bench.cases.jax import _batch, _load
    from polyaccel.jax.verify.first_step import FirstStepProof as JaxProof

    model, seconds = _load("gpt_jax"), list[float]()
    shape = model.SHAPES["medium"]
    config = {
        "verify": "always",
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "activation_checkpointing": {"enabled": True},
    }
    with patch.object(JaxProof, "_conclude", _conclude):
        engine = polyaccel.initialize(
            model=partial(model.loss, heads=shape.heads), params=model.initial_params(shape, 0), config=config
        )
        for step in range(steps + 1):
            began_s = perf_counter()
            engine.train_batch(_batch(step, 0, 1, shape.context))
            seconds.append(perf_counter() - began_s)
        engine.destroy()
    return _seconds.pop(get_ident()), median(seconds[1:])


def _of_7b() -> tuple[float, float, int]:
    """Return the seconds in which the small model is made and proven, and its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        large = LlamaForCausalLM(LlamaConfig(**_LLAMA))
    began_s = perf_counter()
    small = ShrunkModel(large)
    build_s = perf_counter() - began_s
    numel = sum(one.numel() for one in small.module.parameters())
    words = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))

    def on_rank(_: object) -> float:
        return _proven(ShrunkModel(large).module, {"mesh": {"tensor": 2}}, 2, lambda trainer: trainer.step(words))

    return build_s, run_threads(2, on_rank)[0], numel


def _proven(model: nn.Module, config: dict[str, Any], micro_batch: int, train: Callable[[Trainer], Any]) -> float:
    """Train, and return the seconds of the proof."""
    base = {"verify": "always", "train_micro_batch_size_per_gpu": micro_batch}
    optimizer = {"optimizer": {"type": "AdamW", "params": ADAMW}, "gradient_clipping": 1.0}
    engine, *_ = polyaccel.initialize(model=model, config={**base, **optimizer, **config})
    train(engine_trainer(engine, transformers_loss(engine) if hasattr(model, "config") else None))
    engine.destroy()
    found = _seconds.pop(get_ident(), 0.0)
    assert found, "nothing was proven"
    return found
