"""Coalesced collectives and the one-bit all-reduce between processes, over gloo: the bits that threads get."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from polyaccel.comm.api.coalescing import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from polyaccel.comm.api.compressed import CompressedAllReduce
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.testkit.comm.values import put, values_of
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.threads import run_threads

KINDS = ((5, DType.FLOAT32), (0, DType.FLOAT32), (3, DType.INT64), (64, DType.BFLOAT16), (7, DType.FLOAT32))
NUMEL = 5_003


def coalesced(comm: Communicator) -> list[bytes]:
    """The results of an all-reduce, an all-gather and a reduce-scatter, under way at once."""
    world = comm.world_size
    reduced, mine, parts = (
        [put(comm, values_of(comm.rank, numel, salt=salt), dtype) for salt, (numel, dtype) in enumerate(KINDS)]
        for _ in range(3)
    )
    wholes = [comm.allocate(numel * world, dtype) for numel, dtype in KINDS]
    sources = [
        put(comm, values_of(comm.rank, numel * world, salt=salt), dtype) for salt, (numel, dtype) in enumerate(KINDS)
    ]
    works = [
        all_reduce_coalesced(comm, reduced, async_op=True),
        all_gather_coalesced(comm, wholes, mine, async_op=True),
        reduce_scatter_coalesced(comm, parts, sources, async_op=True),
    ]
    for work in works:
        work.wait()
    return [buffer.to_bytes() for buffer in (*reduced, *wholes, *parts)]


def one_bit(comm: Communicator) -> list[bytes]:
    """Three averages of one quantity: the third depends on what the first two left out."""
    average = CompressedAllReduce(NUMEL, comm)
    results = []
    for step in range(3):
        generator = np.random.default_rng((comm.rank, step))
        tensor = torch.from_numpy(generator.uniform(-1, 1, NUMEL).astype(np.float32))
        average(tensor)
        results.append(tensor.numpy().tobytes())
    return results


@pytest.mark.parametrize("work", [coalesced, one_bit])
def test_processes_get_the_bits_of_threads(
    rank_pool: Callable[[int], RankPool], work: Callable[[Communicator], list[bytes]]
) -> None:
    assert rank_pool(2).run(work) == run_threads(2, work)
