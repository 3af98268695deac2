"""One rank of `python -m bench sequence`: seconds of forward and backward of one way to compute causal attention.

Usage: worker.py RESULT WAY LENGTH STEPS. Imports polyaccel for its own ways only, so that an environment which has
DeepSpeed and no polyaccel runs it too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

HEADS, KEY_HEADS, WIDTH = 8, 8, 64
WARMUP = 1
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of this rank, (rows, heads, tokens, width), to its outputs."""


def main(result: str, way: str, length: int, steps: int) -> None:
    """Time `way`, and write what rank 0 measured to the file `result`."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    attention = _WAYS[way](length)
    generator = torch.Generator().manual_seed(0)
    counts = HEADS, KEY_HEADS, KEY_HEADS, HEADS
    tensors = [torch.randn(1, heads, length, WIDTH, generator=generator) for heads in counts]
    spans = _spans(way, length, rank, ranks)
    *inputs, grad = (torch.cat([one[:, :, start:end] for start, end in spans], 2) for one in tensors)
    leaves = [one.clone().requires_grad_(True) for one in inputs]
    seconds, used, checked = [], [], 0.0
    for _ in range(WARMUP + steps):
        for leaf in leaves:
            leaf.grad = None
        began, used_before = perf_counter(), process_time()
        out = attention(*leaves)
        torch.autograd.backward(out, grad)
        seconds.append(perf_counter() - began)
        used.append(process_time() - used_before)
        results = [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        checked = sum(float(result.double().square().sum()) for result in results)
    total = torch.tensor([checked], dtype=torch.float64)
    found = {"seconds": median(seconds[WARMUP:]), "cpu_seconds": median(used[WARMUP:]), "checked": checked}
    if ranks > 1:
        found["checked"] = _summed(way, total)
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    if way == "deepspeed":  # its process aborts or hangs where gloo is taken down
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


def _spans(way: str, length: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """The tokens of this rank."""
    if way == "ring":
        part = length // (2 * ranks)
        last = 2 * ranks - 1 - rank
        return [(rank * part, (rank + 1) * part), (last * part, (last + 1) * part)]
    part = length // ranks
    return [(rank * part, (rank + 1) * part)]


def _summed(way: str, value: Tensor) -> float:
    """`value`, added over the ranks."""
    if way in ("ulysses", "ring"):
        from polyaccel.comm.default import default_communicator

        communicator = default_communicator()
        communicator.all_reduce(communicator.accelerator.wrap(value))
    else:
        dist.all_reduce(value)
    return float(value)


def _whole(length: int) -> Attention:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)


def _ours(way: str, length: int) -> Attention:
    import polyaccel
    from polyaccel.comm.default import default_communicator
    from polyaccel.torch.context_parallel import (
        AttentionRule,
        DocumentMask,
        TokenShares,
        ring_attention,
        ulysses_attention,
    )

    polyaccel.init_distributed()
    communicator = default_communicator()
    make = TokenShares.balanced if way == "ring" else TokenShares.contiguous
    attention: Any = ring_attention if way == "ring" else ulysses_attention
    arguments = {
        "rule": AttentionRule(),
        "marks": DocumentMask(length),
        "shares": make(length, communicator.world_size),
    }
    return lambda q, k, v: attention(q, k, v, communicator, **arguments)


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
    """Keys and values of all ranks on each, as torch's context parallel has them by its method "allgather"."""
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
    "ulysses": lambda length: _ours("ulysses", length),
    "ring": lambda length: _ours("ring", length),
    "gathered": _gathered,
    "deepspeed": _deepspeed,
}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
