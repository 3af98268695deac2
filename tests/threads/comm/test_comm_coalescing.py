"""Many small buffers in one collective are what many collectives give, and one call for each element type."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polyaccel import comm as public
from polyaccel.comm.api.coalescing import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.testkit.comm.values import put, values_of
from polyaccel.testkit.ranks.threads import run_threads

KINDS = ((5, DType.FLOAT32), (0, DType.FLOAT32), (3, DType.INT64), (64, DType.BFLOAT16), (7, DType.FLOAT32))


def buffers(comm: Communicator, *, parts: int = 1) -> list[Buffer]:
    return [
        put(comm, values_of(comm.rank, numel * parts, salt=salt), dtype) for salt, (numel, dtype) in enumerate(KINDS)
    ]


def contents(found: Sequence[Buffer]) -> list[bytes]:
    return [buffer.to_bytes() for buffer in found]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_they_give_what_single_calls_give(world: int, async_op: bool) -> None:
    def body(comm: Communicator) -> dict[str, int]:
        recording = RecordingCommunicator(comm, watch_s=None)
        found, wanted = buffers(comm), buffers(comm)
        all_reduce_coalesced(recording, found, ReduceOp.MAX, async_op=async_op).wait()
        for buffer in wanted:
            comm.all_reduce(buffer, ReduceOp.MAX)
        assert contents(found) == contents(wanted)

        outs, expected = ([comm.allocate(numel * world, dtype) for numel, dtype in KINDS] for _ in range(2))
        all_gather_coalesced(recording, outs, wanted, async_op=async_op).wait()
        for out, source in zip(expected, wanted, strict=True):
            comm.all_gather(out, source)
        assert contents(outs) == contents(expected)

        sources = buffers(comm, parts=world)
        before = contents(sources)
        reduce_scatter_coalesced(recording, found, sources, async_op=async_op).wait()
        for out, source in zip(wanted, sources, strict=True):
            comm.reduce_scatter(out, source)
        assert contents(found) == contents(wanted)
        assert contents(sources) == before
        return dict(recording.recorder.calls)

    calls = {"all_reduce": 3, "all_gather": 3, "reduce_scatter": 3}  # one for each element type
    assert run_threads(world, body) == [calls] * world


def test_lists_that_do_not_match_are_refused() -> None:
    def body(comm: Communicator) -> None:
        one, two = comm.allocate(2, DType.FLOAT32), comm.allocate(4, DType.FLOAT32)
        with pytest.raises(ShardingError) as caught:
            all_gather_coalesced(comm, [two, two], [one])
        assert caught.value.value == (2, 1)
        with pytest.raises(ShardingError) as caught:
            reduce_scatter_coalesced(comm, [two], [two])
        assert caught.value.value == (4, 4)
        assert "reduce_scatter_coalesced" in str(caught.value)

    run_threads(2, body)


def test_users_functions_take_tensors() -> None:
    import torch

    def body(comm: Communicator) -> None:
        tensors = [torch.full((3,), 1.0 + comm.rank), torch.tensor([comm.rank])]
        public.all_reduce_coalesced(tensors)
        assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3, [1]]
        wholes = [torch.zeros(6), torch.zeros(2, dtype=torch.int64)]
        work = public.all_gather_coalesced(wholes, [torch.full((3,), float(comm.rank)), tensors[1]], async_op=True)
        assert work is not None
        work.wait()
        assert [whole.tolist() for whole in wholes] == [[0.0] * 3 + [1.0] * 3, [1, 1]]
        part = torch.zeros(3)
        public.reduce_scatter_coalesced([part], [wholes[0]])
        assert part.tolist() == [2.0 * comm.rank] * 3

    run_threads(2, body)
