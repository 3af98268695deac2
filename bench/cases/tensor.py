"""Passes of two tensor-parallel ranks, with tokens shared too, of torch's DTensor, and of one rank with two threads.

A Llama of 16 million parameters from transformers, AdamW, fp32, the same batch at each step. Times are those of forward
and backward, where the variants differ; *kept* are the bytes that autograd keeps of a forward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import median
from typing import Any

from bench.measure import measured
from bench.runner import MIB, Case, Column, Found, Option, Runs, Settings, Start, losses_off

_LAYERS, _WORDS, _WARMUP, _RANKS = 4, 4096, 3, 2
_ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launch of each variant."""
    one = Start(1, environ={"OMP_NUM_THREADS": "2"})
    return {"polyaccel": Start(), "tokens shared": Start(), "DTensor": Start(), "one rank": one}


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns."""

    def passes(own: Runs) -> list[float]:
        return [a + b for a, b in zip(own.every("forward"), own.every("backward"), strict=True)]

    def ratio(own: Runs, found: Found) -> str:
        return f"{median(passes(found['DTensor'])) / median(passes(own)):.2f}" if "DTensor" in found else "-"

    def off(own: Runs, found: Found) -> str:
        return f"{losses_off(own, found['one rank']):.1e}" if "one rank" in found else "-"

    return {
        "median ms": lambda own, found: f"{1e3 * median(passes(own)):.1f}",
        "min ms": lambda own, found: f"{1e3 * min(passes(own)):.1f}",
        "x DTensor": ratio,
        "loss off by": off,
        "kept MB": lambda own, found: f"{own.values('kept_nbytes')[0] / MIB:.1f}",
    }


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train the Llama; return the figures of `measured`, phases and the kept bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    import polyaccel
    from bench.training import engine_trainer, random_words, torch_trainer, transformers_loss
    from polyaccel.torch.activation_checkpointing.measuring import SavedMemory

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": _WORDS, "hidden_size": 512, "intermediate_size": 1408}
    shape |= {"num_hidden_layers": _LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    if variant in ("polyaccel", "tokens shared"):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": _ADAMW},
            "tensor_parallel": {"autotp_size": _RANKS, "sequence_sharded": variant == "tokens shared"},
        }
        model = polyaccel.initialize(model=model, config=config)[0]
        trainer = engine_trainer(model, transformers_loss(model))
    else:
        if variant == "DTensor":
            parallelize(model)
        trainer = torch_trainer(model, transformers_loss(model), clip=0, fused=False, foreach=False, **_ADAMW)
    words = random_words((2, 256), _WORDS, 1)
    figures = measured(lambda step: trainer.step(words), s["steps"], _WARMUP)
    kept: dict[Any, int] = {}
    with SavedMemory([*model.parameters(), *model.buffers()]).counting(lambda: kept):
        trainer.loss_of(words)
    phases = {name: times[_WARMUP:] for name, times in trainer.phases.items()}
    return {**figures, **phases, "kept_nbytes": sum(kept.values())}


def parallelize(model: Any) -> None:
    """Apply torch's parallelize_module: the same layers, cut in the same way."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(_LAYERS):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (_RANKS,)), plan)


_OPTIONS = {"steps": Option(10, "measured in each launch")}
CASES = {"tensor": Case("tensor", __doc__ or "", _OPTIONS, variants, columns, "two tensor-parallel ranks")}
