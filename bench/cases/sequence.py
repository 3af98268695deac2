"""Causal attention of one sequence over two ranks, forward and backward.

The ways are Ulysses and ring attention by shared memory and by gloo, keys and values gathered by torch, DeepSpeed's
Ulysses, and one process with two threads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from bench.measure import measured
from bench.runner import DEEPSPEED, Case, Column, Found, Option, Runs, Settings, Start, deepspeed_start, ms, speed

HEADS, WIDTH = 8, 64
_NEAR = 1e-4
_WHOLE = "whole"
_OURS = ("ulysses shm", "ring shm", "ulysses gloo", "ring gloo")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of this rank, (rows, heads, tokens, width), to its outputs."""


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launch of each way."""
    ours = {name: Start(environ={"POLYACCEL_COMM": name.split()[1]}) for name in _OURS}
    whole = Start(1, "python", environ={"OMP_NUM_THREADS": "2"})
    return {
        _WHOLE: whole,
        **ours,
        "gathered gloo": Start(launcher="torchrun"),
        "deepspeed gloo": deepspeed_start(args),
    }


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns."""
    return {"median ms": ms(), "least ms": ms(best=True), "CPU ms": ms("cpu"), "x whole": speed(_WHOLE)}


def is_wrong(own: Runs, found: Found) -> bool:
    """Return whether the sum of squares of outputs and gradients differs from the first way's."""
    wanted = next(iter(found.values())).values("checked")[0]
    return any(abs(checked / wanted - 1) > _NEAR for checked in own.values("checked"))


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Time a way; return the figures of `measured` and the sum of squares over ranks."""
    way, length = variant.split()[0], s["length"]
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    attention = _WAYS[way](length)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(4)]
    spans = _spans(way, length, rank, ranks)
    *inputs, grad = (torch.cat([one[:, :, start:end] for start, end in spans], 2) for one in tensors)
    leaves = [one.clone().requires_grad_(True) for one in inputs]
    results: list[Tensor] = []

    def step(number: int) -> float:
        for leaf in leaves:
            leaf.grad = None
        out = attention(*leaves)
        torch.autograd.backward(out, grad)
        results[:] = [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        return 0.0

    figures = measured(step, s["steps"], 1)
    checked = torch.stack([result.double().square().sum() for result in results]).sum()
    if way in ("ulysses", "ring"):
        from polyaccel.comm.default import default_communicator

        communicator = default_communicator()
        communicator.all_reduce(communicator.accelerator.wrap(checked.reshape(1)))
    elif ranks > 1:
        dist.all_reduce(checked)
    return {**figures, "checked": float(checked)}


def _spans(way: str, length: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Return the tokens of this rank."""
    if way == "ring":
        part = length // (2 * ranks)
        last = 2 * ranks - 1 - rank
        return [(rank * part, (rank + 1) * part), (last * part, (last + 1) * part)]
    part = length // ranks
    return [(rank * part, (rank + 1) * part)]


def _whole(length: int) -> Attention:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)


def _ours(way: str, length: int) -> Attention:
    import polyaccel
    from polyaccel.comm.default import default_communicator
    from polyaccel.torch import context_parallel as cp

    polyaccel.init_distributed()
    communicator = default_communicator()
    make = cp.TokenShares.balanced if way == "ring" else cp.TokenShares.contiguous
    attention: Any = cp.ring_attention if way == "ring" else cp.ulysses_attention
    shares = make(length, communicator.world_size)
    rules = {"rule": cp.AttentionRule(), "marks": cp.DocumentMask(length), "shares": shares}
    return lambda q, k, v: attention(q, k, v, communicator, **rules)


class _Gathered(torch.autograd.Function):
    """All ranks' tokens, by torch's all-gather; their gradients by its reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        parts = [part.contiguous() for part in grad.chunk(dist.get_world_size(), 2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


def _gathered(length: int) -> Attention:
    """Gather keys and values of all ranks on each, as torch's context parallelism does by "allgather"."""
    dist.init_process_group("gloo")
    rank, part = dist.get_rank(), length // dist.get_world_size()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_Gathered.apply(one) for one in (k, v))  # type: ignore[no-untyped-call]
        seen = torch.arange(rank * part, (rank + 1) * part)[:, None] >= torch.arange(length)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return attention


def _deepspeed(length: int) -> Attention:
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-not-found,import-untyped,unused-ignore]

    deepspeed.init_distributed("gloo")

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()

    layer = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(*(one.transpose(1, 2) for one in (q, k, v)), 0)
        return out.transpose(1, 2)

    return attention


_WAYS: dict[str, Callable[[int], Attention]] = {
    "whole": _whole,
    "ulysses": partial(_ours, "ulysses"),
    "ring": partial(_ours, "ring"),
    "gathered": _gathered,
    "deepspeed": _deepspeed,
}
_OPTIONS = {"length": Option(4096, "tokens"), "steps": Option(5, "measured in each launch"), "deepspeed": DEEPSPEED}
_TITLE = "causal attention, {length} tokens, two ranks of a thread each, fp32, forward and backward"
CASES = {"sequence": Case("sequence", __doc__ or "", _OPTIONS, variants, columns, _TITLE, is_wrong=is_wrong)}
