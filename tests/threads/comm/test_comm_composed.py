"""What the base makes of what a backend has, and wrappers: the contract's parts of other sizes, gathers and batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.accelerators.memory.torch import TorchBuffer
from polyaccel.comm.backends.local.backend import LocalCommunicator
from polyaccel.comm.base import Communicator, message_to
from polyaccel.comm.collective import EQUAL_PARTS, UNEVEN_PARTS, Collective, Operation
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.work import Work
from polyaccel.comm.wrappers.quantized import QuantizedCommunicator
from polyaccel.comm.wrappers.staged import StagedCommunicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError
from polyaccel.testkit.comm import uneven
from polyaccel.testkit.comm.values import get, put, values_of
from polyaccel.testkit.ranks.threads import run_threads

BODIES = (
    uneven.all_gather_takes_uneven_parts,
    uneven.reduce_scatter_takes_uneven_parts,
    uneven.all_to_all_takes_uneven_parts,
    uneven.gather_and_scatter_have_any_root,
    uneven.batches_of_messages_wait_for_no_order,
    uneven.wrong_counts_are_refused_on_the_spot,
)


class Plain(LocalCommunicator):
    """A backend of the days before uneven parts."""

    native_ops: ClassVar[frozenset[Operation]] = EQUAL_PARTS
    native_uneven_ops: ClassVar[frozenset[Operation]] = frozenset()

    def start(self, collective: Collective) -> Work:
        assert collective.operation in EQUAL_PARTS
        assert not collective.is_uneven
        return super().start(collective)


class Messages(Plain):
    """Not even an all-to-all."""

    native_ops: ClassVar[frozenset[Operation]] = EQUAL_PARTS - {Operation.ALL_TO_ALL}


class Deaf(Plain):
    """No messages either."""

    native_ops: ClassVar[frozenset[Operation]] = frozenset({Operation.ALL_REDUCE, Operation.BARRIER})


def of(kind: type[Plain], comm: Any) -> Plain:
    return kind(comm.rank, comm._group, comm.accelerator)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("kind", [Plain, Messages])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_a_backend_lacks_is_made_of_what_it_has(world: int, kind: type[Plain], body: Any) -> None:
    assert all(run_threads(world, lambda comm: body(of(kind, comm))))


def test_an_equal_all_to_all_too() -> None:
    def check(comm: LocalCommunicator) -> None:
        out, source = comm.allocate(6, DType.FLOAT32), put(comm, values_of(comm.rank, 6), DType.FLOAT32)
        of(Messages, comm).all_to_all(out, source)
        own = slice(comm.rank * 2, comm.rank * 2 + 2)
        assert np.array_equal(get(comm, out), np.concatenate([values_of(rank, 6)[own] for rank in range(3)]))

    run_threads(3, check)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("world", [1, 3])
def test_staged_buffers_have_uneven_parts(world: int, body: Any) -> None:
    device = CpuAccelerator()
    assert all(
        run_threads(world, lambda comm: body(RecordingCommunicator(StagedCommunicator(comm, device), watch_s=None)))
    )


class Pinning(CpuAccelerator):
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), host_pinning=True)


@pytest.mark.parametrize(("device", "staged"), [(CpuAccelerator, TorchBuffer), (Pinning, NumpyBuffer)])
def test_a_device_that_pins_no_memory_is_staged_in_what_the_host_s_kernels_take(
    device: type[CpuAccelerator], staged: type[Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = device("numpy")  # whose memory the kernels of torch do not take
    seen: list[Buffer | None] = []
    original = LocalCommunicator.call

    def call(self: LocalCommunicator, collective: Collective) -> Work:
        seen.append(collective.target)
        return original(self, collective)

    monkeypatch.setattr(LocalCommunicator, "call", call)

    def average(comm: LocalCommunicator) -> list[float]:
        buffer = far.allocate(3, DType.FLOAT64)
        buffer.fill(comm.rank)
        StagedCommunicator(comm, far).all_reduce(buffer, ReduceOp.AVG)
        return [float(value) for value in buffer.raw]

    assert run_threads(3, average, accelerator=CpuAccelerator("torch")) == [[1.0] * 3] * 3
    assert {type(buffer) for buffer in seen} == {staged}


def test_what_cannot_be_made_is_an_error_that_says_what_is_missing() -> None:
    def body(comm: LocalCommunicator) -> None:
        deaf, buffer = of(Deaf, comm), comm.allocate(4, DType.FLOAT32)
        with pytest.raises(CommError) as caught:
            deaf.all_to_all(comm.allocate(4, DType.FLOAT32), buffer)
        assert caught.value.value == "all_to_all"
        assert "'local'" in str(caught.value)
        counts = [4 - 3 * comm.rank, 3 * comm.rank]
        whole = comm.allocate(sum(counts), DType.FLOAT32)
        with pytest.raises(CommError) as caught:
            deaf.all_gather(whole, buffer.view(0, counts[comm.rank]), counts=counts)
        assert caught.value.value == "all_gather"
        with pytest.raises(CommError) as caught:
            deaf.batch([message_to(buffer, 1 - comm.rank)])
        assert caught.value.value == "batch"
        deaf.barrier()

    run_threads(2, body)


def test_the_record_counts_what_uneven_parts_send() -> None:
    """Each part once to each rank that wants it, and one entry a call, whatever it is made of."""

    def body(comm: LocalCommunicator) -> tuple[dict[str, float], list[tuple[str, int]]]:
        recorded = RecordingCommunicator(of(Plain, comm), watch_s=None)
        counts = [1, 5, 2]
        mine, whole = comm.allocate(counts[comm.rank], DType.FLOAT32), comm.allocate(8, DType.FLOAT32)
        recorded.all_gather(whole, mine, counts=counts)
        recorded.reduce_scatter(mine, whole, counts=counts)
        recorded.gather(whole if comm.rank == 1 else None, mine, 1, counts=counts)
        recorded.scatter(mine, whole if comm.rank == 1 else None, 1, counts=counts)
        found = [(entry.collective.described(), entry.seq) for entry in recorded.recorder.entries]
        return dict(recorded.recorder.sent_numel), found

    for rank, (sent, entries) in enumerate(run_threads(3, body)):
        own = [1, 5, 2][rank]
        assert sent == {
            "all_gather": 2 * own,
            "reduce_scatter": 8 - own,
            "gather": 0 if rank == 1 else own,
            "scatter": 3 if rank == 1 else 0,
        }
        assert entries == [
            ("all_gather 8 x float32 in parts of [1, 5, 2]", 0),
            ("reduce_scatter sum 8 x float32 in parts of [1, 5, 2]", 1),
            ("gather to 1 8 x float32 in parts of [1, 5, 2]", 2),
            ("scatter from 1 8 x float32 in parts of [1, 5, 2]", 3),
        ]


def test_quantised_uneven_gathers_are_quantised_and_others_exact() -> None:
    def body(comm: Communicator) -> None:
        recorded = RecordingCommunicator(comm, watch_s=None)
        coded = QuantizedCommunicator(recorded, gather_bits=8, reduce_bits=8, block_numel=8)
        counts = [3, 0, 40]
        mine = put(comm, np.linspace(-1, 1, counts[comm.rank]), DType.FLOAT32)
        whole = comm.allocate(43, DType.FLOAT32)
        coded.all_gather(whole, mine, counts=counts)
        assert np.allclose(get(comm, whole), np.concatenate([np.linspace(-1, 1, n) for n in counts]), atol=1 / 127)
        assert {entry.collective.dtype for entry in recorded.recorder.entries} == {DType.INT8, DType.FLOAT32}
        assert all(body(coded) for body in (uneven.all_to_all_takes_uneven_parts,))
        assert coded.native_uneven_ops < UNEVEN_PARTS

    run_threads(3, body)


def test_ranks_that_expect_other_parts_of_an_all_to_all_are_told() -> None:
    def body(comm: LocalCommunicator) -> None:
        sent, expected = ([2, 4], [2, 2]) if comm.rank == 0 else ([3, 3], [3, 3])
        source, out = comm.allocate(sum(sent), DType.FLOAT32), comm.allocate(sum(expected), DType.FLOAT32)
        other, theirs, ours = (1, 3, 2) if comm.rank == 0 else (0, 4, 3)
        with pytest.raises(CommError) as caught:
            comm.all_to_all(out, source, counts=expected, source_counts=sent)
        assert all(part in str(caught.value) for part in (str(other), str(theirs), str(ours)))

    run_threads(2, body)
