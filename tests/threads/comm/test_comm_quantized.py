"""Quantised gathers and reduce-scatters: bounded errors, the same values on every rank, and what they send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.wrappers.quantized import Bits, QuantizedCommunicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.testkit.comm.values import get, put, refused, values_of
from polyaccel.testkit.ranks.threads import run_threads

BLOCK = 8
MOST = {8: 127, 4: 7}


def quantized(comm: Communicator, bits: Bits) -> QuantizedCommunicator:
    return QuantizedCommunicator(comm, gather_bits=bits, reduce_bits=bits, block_numel=BLOCK)


def numbers_of(rank: int, numel: int) -> Any:
    """Numbers whose magnitude differs much between places."""
    return np.random.default_rng(rank).standard_normal(numel) * np.repeat([1e-3, 1.0, 50.0], -(-numel // 3))[:numel]


def half_scales(values: Any, bits: int) -> Any:
    """The most by which each element may be off: half a step of its block."""
    padded = np.concatenate((np.abs(values), np.zeros(-values.size % BLOCK))).reshape(-1, BLOCK)
    return np.repeat(padded.max(axis=1), BLOCK)[: values.size] / MOST[bits] / 2 * 1.001 + 1e-7


@pytest.mark.parametrize(
    ("dtype", "is_numpy"), [(DType.FLOAT32, False), (DType.BFLOAT16, False), (DType.FLOAT32, True)]
)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_gather_gives_all_ranks_values_within_half_a_step(
    world: int, bits: Bits, dtype: DType, is_numpy: bool
) -> None:
    def body(comm: Communicator) -> list[bytes]:
        coded, found = quantized(comm, bits), []
        for numel in (0, 1, 7, 64, 1001):
            expected = [get(comm, put(comm, numbers_of(rank, numel), dtype)) for rank in range(world)]
            for in_place in (False, True):
                out = comm.allocate(numel * world, dtype)
                own = out.view(comm.rank * numel, numel) if in_place else comm.allocate(numel, dtype)
                own.copy_from(put(comm, expected[comm.rank], dtype))
                coded.all_gather(out, own, async_op=in_place).wait()
                bound = np.concatenate([half_scales(each, bits) for each in expected])
                rounding = np.abs(np.concatenate(expected)) * (2.0**-7 if dtype is DType.BFLOAT16 else 1e-6)
                assert np.all(np.abs(get(comm, out) - np.concatenate(expected)) <= bound + rounding)
                found.append(out.to_bytes())
        return found

    results = run_threads(world, body, accelerator=CpuAccelerator("numpy") if is_numpy else None)
    assert all(one == results[0] for one in results)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_reduce_scatter_adds_what_each_rank_quantised_once(world: int, bits: Bits, op: ReduceOp) -> None:
    def body(comm: Communicator) -> int:
        coded = quantized(comm, bits)
        for numel in (0, 1, 7, 64, 1001):
            everybody = [numbers_of(rank, numel * world) for rank in range(world)]
            own = slice(comm.rank * numel, (comm.rank + 1) * numel)
            bound = sum(half_scales(values[own], bits) for values in everybody)
            expected = sum(values[own] for values in everybody)
            divisor = world if op is ReduceOp.AVG else 1
            for in_place in (False, True):
                source = put(comm, everybody[comm.rank], DType.FLOAT32)
                out = source.view(own.start, numel) if in_place else comm.allocate(numel, DType.FLOAT32)
                coded.reduce_scatter(out, source, op, async_op=in_place).wait()
                assert np.all(np.abs(get(comm, out) * divisor - expected) <= bound + 1e-4)
        return 1

    assert run_threads(world, body) == [1] * world


def test_what_is_not_finite_arrives_as_nan_and_spoils_its_block_only() -> None:
    def body(comm: Communicator) -> Any:
        values = np.ones(4 * BLOCK)
        values[BLOCK] = np.inf if comm.rank == 1 else 1.0
        part = comm.allocate(2 * BLOCK, DType.FLOAT32)
        quantized(comm, 4).reduce_scatter(part, put(comm, values, DType.FLOAT32))
        return np.isnan(get(comm, part)).tolist()

    assert run_threads(2, body) == [[False] * BLOCK + [True] * BLOCK, [False] * 2 * BLOCK]


def test_everything_else_is_exact() -> None:
    """Integers, other reductions, other collectives, and widths that were not asked for."""

    def body(comm: Communicator) -> int:
        coded = quantized(comm, 4)
        numel = 6
        parts = [values_of(rank, numel * 3) for rank in range(3)]
        own = slice(comm.rank * numel, (comm.rank + 1) * numel)
        whole = comm.allocate(numel * 9, DType.INT64)
        coded.all_gather(whole, put(comm, parts[comm.rank], DType.INT64))
        assert np.array_equal(get(comm, whole), np.concatenate(parts))
        largest = comm.allocate(numel, DType.FLOAT32)
        coded.reduce_scatter(largest, put(comm, parts[comm.rank], DType.FLOAT32), ReduceOp.MAX)
        assert np.array_equal(get(comm, largest), np.maximum.reduce(parts)[own])
        total = put(comm, np.array([0.1, 7.3]) + comm.rank, DType.FLOAT32)
        exact = put(comm, np.array([0.1, 7.3]) + comm.rank, DType.FLOAT32)
        coded.all_reduce(total)
        comm.all_reduce(exact)
        assert total.to_bytes() == exact.to_bytes()
        only_gathers = QuantizedCommunicator(comm, gather_bits=8, reduce_bits=None, block_numel=BLOCK)
        found, wanted = (comm.allocate(numel, DType.FLOAT32) for _ in range(2))
        source = put(comm, numbers_of(comm.rank, numel * 3), DType.FLOAT32)
        only_gathers.reduce_scatter(found, source)
        comm.reduce_scatter(wanted, source)
        assert found.to_bytes() == wanted.to_bytes()
        pair = coded.split([0, 2])
        assert (pair is None) == (comm.rank == 1)
        assert coded.broadcast_object(comm.rank, 2) == 2
        checks = refused(ShardingError, lambda: coded.all_gather(total, exact), "a gather of another size")
        comm.barrier()
        return checks

    assert run_threads(3, body) == [1] * 3


def test_odd_blocks_are_refused() -> None:
    comm = run_threads(1, lambda comm: comm)[0]
    with pytest.raises(ShardingError) as caught:
        QuantizedCommunicator(comm, gather_bits=8, reduce_bits=4, block_numel=7)
    assert caught.value.value == 7


def test_the_record_shows_codes_and_scales() -> None:
    """64 elements a rank in 4 bits: 32 bytes of codes and 8 scales for each of the other ranks."""

    def body(comm: Communicator) -> list[tuple[str, int, DType | None]]:
        recording = RecordingCommunicator(comm, watch_s=None)
        coded = quantized(recording, 4)
        out, whole = comm.allocate(64, DType.FLOAT32), comm.allocate(192, DType.FLOAT32)
        coded.reduce_scatter(out, whole)
        coded.all_gather(whole, out)
        assert recording.sent_numel == 2 * 2 * (32 + 8)
        return [
            (entry.collective.operation, entry.collective.numel, entry.collective.dtype)
            for entry in recording.recorder.entries
        ]

    codes, scales = (96, DType.UINT8), (24, DType.FLOAT32)
    wanted = [(op, *sent) for op in ("all_to_all", "all_gather") for sent in (codes, scales)]
    assert run_threads(3, body) == [wanted] * 3
