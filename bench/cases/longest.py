"""Longest sequence that a small Llama trains on within a limit of memory a rank, on two ranks.

The ways are plain ZeRO-3, polyaccel's context parallelism, recomputation and tiles, and DeepSpeed's ALST. Peaks are
VmHWM of a rank's process, with the interpreter, torch and transformers. They grow linearly with the length, so each
trial is where a line through the last two meets the limit. A search ends when the longest that fits and the shortest
that does not are within a few percent, or at `--most`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import measured
from bench.runner import DEEPSPEED, MIB, Option, Settings, Start, begin, launch, parse, say, table

_NEAR, _STEP, _STEPS, _WORDS = 0.04, 64, 2, 32_000
_SEQUENCE = {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ulysses"}}
_RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
_WAYS: dict[str, tuple[str, dict[str, Any], float]] = {
    "plain": ("ZeRO-3", {}, 1e-4),
    "recomputed": ("and recomputation", _RECOMPUTED, 1e-4),
    "sequence": ("ZeRO-3, sequence over both ranks", _SEQUENCE, 1e-4),
    "sequence-recomputed": ("and recomputation", _SEQUENCE | _RECOMPUTED, 1e-4),
    "tiles": ("and tiles", _SEQUENCE | _RECOMPUTED | {"tiled_compute": {"enabled": True}}, 1e-4),
    "alst": ("DeepSpeed's ALST", {"sequence_parallel_size": 2}, 1e-3),
}
"""By name: what the table says, the config, and how far its loss may be from the first way's."""


class Trial(NamedTuple):
    """Two steps on sequences of `length`: the higher peak of both ranks in bytes, the last loss, seconds of a step."""

    length: int
    peak: int
    loss: float
    seconds: float


def main(argv: Sequence[str]) -> int:
    """Return 1 if a way computed another loss at the first length."""
    options = {
        "gigabytes": Option(2.0, "of memory a rank"),
        "first": Option(1024, "tokens of the first trial"),
        "most": Option(65_536, "tokens of the longest trial"),
        "impl": Option(tuple(_WAYS), "ways", _WAYS),
        "deepspeed": DEEPSPEED,
    }
    args = parse("longest", __doc__ or "", options, argv)
    begin()
    limit = int(args.gigabytes * 2**30)
    rows, first, base, is_wrong = [], None, 0, False
    for way in args.impl:
        if way == "alst" and args.deepspeed is None:
            continue
        trials = search(way, args, limit)
        best = max((one for one in trials if one.peak <= limit), key=lambda one: one.length, default=trials[0])
        first, base = first or trials[0], base or best.length
        is_wrong |= abs(trials[0].loss - first.loss) > _WAYS[way][2]
        low, high = min(trials), max(trials)
        slope = (high.peak - low.peak) / max(1, high.length - low.length)
        length = f"{best.length}{' or more' if best.length >= args.most else ''}"
        cells = length, f"{best.length / base:.1f}", f"{best.peak / MIB:.0f}", f"{best.seconds:.1f}", f"{slope:.0f}"
        rows.append((_WAYS[way][0], *cells, f"{trials[0].loss:.5f}"))
    title = f"longest sequence within {args.gigabytes:g} GiB a rank, two ranks, fp32, up to {args.most} tokens"
    columns = ("way", "tokens", "times", "peak MiB", "s a step", "bytes a token", f"loss at {args.first}")
    table(title, columns, rows)
    return int(is_wrong)


def search(way: str, args: argparse.Namespace, limit: int) -> list[Trial]:
    """Return all trials of `way`, the first ones at `args.first` tokens and twice that."""
    trials: list[Trial] = []
    first, most = args.first, args.most
    length = first
    while not any(one.length == length for one in trials):
        trial = measure(way, length, args.deepspeed)
        say(f"{way}, {length} tokens: {trial.peak / MIB:.0f} MiB, {trial.seconds:.1f} s a step")
        trials.append(trial)
        fits = max((one.length for one in trials if one.peak <= limit), default=0)
        fails = min((one.length for one in trials if one.peak > limit), default=most + _STEP)
        if fails <= fits * (1 + _NEAR) or fits >= most:
            break
        *_, low, high = [trial, *sorted(trials)]
        length = 2 * first if len(trials) == 1 else _crossing(low, high, limit)
        length = max(fits + _STEP, min(length, most, fails - _STEP, 8 * max(fits, first)))
        length -= length % _STEP
    return trials


def _crossing(low: Trial, high: Trial, limit: int) -> int:
    """Return where a line through two peaks meets the limit."""
    slope = max(1.0, (high.peak - low.peak) / (high.length - low.length))
    return int(high.length + (limit - high.peak) / slope)


def measure(way: str, length: int, deepspeed: Path | None) -> Trial:
    """Launch a way; `deepspeed` is the interpreter of the peer."""
    start = Start(launcher="torchrun", python=deepspeed) if way == "alst" and deepspeed else Start()
    ranks = launch("longest", way, {"length": length}, start, 1800.0)
    loss = sum(rank["losses"][-1] for rank in ranks) / len(ranks)
    return Trial(length, max(rank["peak"] for rank in ranks), loss, max(rank["seconds"][-1] for rank in ranks))


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train two steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from bench.training import engine_trainer, random_words, transformers_loss

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": s["length"]}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=_WORDS)).train()
    ids = random_words((1, s["length"]), _WORDS, 2)
    adamw = {"lr": 1e-3, "weight_decay": 0.0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": adamw | ({"torch_adam": True} if variant == "alst" else {})},
        "zero_optimization": {"stage": 3},
        **_WAYS[variant][1],
    }
    if variant == "alst":
        return measured(_alst_step(model, ids, config), _STEPS, 0)
    import polyaccel

    polyaccel.init_distributed()
    engine: Any = polyaccel.initialize(model=model, config=config)[0]
    trainer = engine_trainer(engine, transformers_loss(engine))
    figures = measured(lambda step: trainer.step(ids), _STEPS, 0)
    engine.destroy()
    return figures


def _alst_step(model: Any, ids: Any, config: dict[str, Any]) -> Any:
    """Return a step as DeepSpeed's ALST guide has it: Ulysses, a tiled loss, tiled MLPs, recomputed layers.

    Its optimizer is torch's: DeepSpeed's own is compiled at the first start, which takes minutes.
    """
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import torch
    from deepspeed.runtime.sequence_parallel import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        ulysses_sp as sp,
    )
    from torch import Tensor
    from torch.nn import functional

    deepspeed.init_distributed("gloo")
    length = ids.shape[1]
    model.config._attn_implementation = "sdpa"
    mpu = sp.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=1,
        seq_length=length,
        seq_length_is_variable=True,
    )

    def tiled_mlp(mlp: Any, x: Tensor) -> Tensor:
        tiles = math.ceil(length / 2 / model.config.hidden_size)
        out: Tensor = sp.TiledMLP.apply(type(mlp).forward, mlp, x, tiles, list(mlp.parameters()))
        return out

    def loss_of(head: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(head(x).float(), y, ignore_index=-100, reduction="sum")

    for layer in model.model.layers:
        layer.mlp.forward = partial(tiled_mlp, layer.mlp)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    engine: Any = deepspeed.initialize(model=model, mpu=mpu, config=config)[0]
    group, rank = mpu.get_sequence_parallel_group(), torch.distributed.get_rank()
    targets = functional.pad(ids[:, 1:], (0, 1), value=-100)
    part = slice(rank * length // 2, (rank + 1) * length // 2)
    positions = torch.arange(length)[None]

    def step(number: int) -> float:
        hidden = engine.module.model(input_ids=ids[:, part], position_ids=positions[:, part], use_cache=False)[0]
        head, own = engine.module.lm_head, targets[:, part]
        tiles = max(1, own.shape[1] * _WORDS // (1 << 22))
        total = sp.TiledFusedLogitsLoss.apply(loss_of, head, hidden, own, None, tiles, [head.weight], "sum")
        loss = total * 2 / (length - 1)
        shown = loss.detach().clone()
        torch.distributed.all_reduce(shown, group=group)
        engine.backward(loss)
        engine.step()
        return float(shown) / 2

    return step
