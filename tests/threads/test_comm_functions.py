"""The torch-shaped functions: tensors and buffers, global ranks, and calls outside a group."""

from __future__ import annotations

import pytest
import torch

from polyaccel import comm
from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError, PolyaccelError
from polyaccel.testkit.threads import run_threads


def test_tensors_go_in_and_results_come_back_in_them() -> None:
    def body(_: Communicator) -> None:
        rank, n = comm.get_rank(), comm.get_world_size()
        tensor = torch.full((2, 3), float(rank))
        assert comm.all_reduce(tensor, comm.ReduceOp.MAX) is None
        assert tensor.tolist() == [[n - 1.0] * 3] * 2
        comm.inference_all_reduce(tensor)
        assert tensor.tolist() == [[n * (n - 1.0)] * 3] * 2
        part = torch.zeros(2)
        work = comm.reduce_scatter_tensor(part, torch.arange(2.0 * n), async_op=True)
        assert work is not None
        work.wait()
        assert part.tolist() == [n * 2.0 * rank, n * (2.0 * rank + 1)]
        whole = torch.zeros(2 * n)
        comm.all_gather_into_tensor(whole, part)
        assert whole.tolist() == [n * float(i) for i in range(2 * n)]
        turned = torch.zeros(n)
        comm.all_to_all_single(turned, torch.full((n,), float(rank)))
        assert turned.tolist() == [float(i) for i in range(n)]
        comm.broadcast(tensor.fill_(rank), 1)
        assert tensor.flatten().tolist() == [1.0] * 6
        listed = [rank, "of", rank]
        comm.broadcast_object_list(listed, 2)
        assert listed == [2, "of", 2]

    run_threads(3, body)


def test_a_buffer_is_as_good_as_a_tensor() -> None:
    def body(communicator: Communicator) -> list[float]:
        buffer = communicator.accelerator.wrap(torch.ones(3))
        comm.all_reduce(buffer)
        result: list[float] = buffer.raw.tolist()
        return result

    assert run_threads(2, body) == [[2.0] * 3] * 2


def test_ranks_are_global_in_groups_and_outsiders_do_nothing() -> None:
    def body(_: Communicator) -> int:
        group = comm.new_group([1, 2])
        tensor = torch.full((2,), float(comm.get_rank()))
        comm.broadcast(tensor, 2, group)
        outside = comm.all_reduce(tensor, group=group, async_op=True)
        assert outside is not None
        outside.wait()
        comm.barrier(group)
        if comm.get_rank() == 1:
            comm.send(tensor, 2, group)
        if comm.get_rank() == 2:
            assert comm.recv(tensor, 1, group) == 1
        if comm.get_rank() == 0:
            assert (comm.get_rank(group), comm.get_world_size(group)) == (-1, -1)
            assert tensor.tolist() == [0.0, 0.0]
            with pytest.raises(CommError, match="not in the group"):
                comm.get_global_rank(group, 0)
        else:
            assert comm.get_global_rank(group, comm.get_rank(group)) == comm.get_rank()
            assert tensor.tolist() == [4.0, 4.0]
            with pytest.raises(CommError, match=r"global rank 0 is not in the group of ranks \[1, 2\]"):
                comm.broadcast(tensor, 0, group)
        return comm.get_world_size(group)

    assert run_threads(3, body) == [-1, 2, 2]


def test_messages_without_waiting() -> None:
    def body(_: Communicator) -> list[float]:
        mine, theirs = torch.full((2,), float(comm.get_rank())), torch.zeros(2)
        other = 1 - comm.get_rank()
        for work in (comm.irecv(theirs, other), comm.isend(mine, other)):
            work.wait()
        return theirs.tolist()

    assert run_threads(2, body) == [[1.0, 1.0], [0.0, 0.0]]


def test_what_has_no_flat_memory_is_refused() -> None:
    def body(_: Communicator) -> None:
        comm.all_reduce(torch.zeros(4, 4).t()[1:])

    with pytest.raises(PolyaccelError, match="contiguous"):
        run_threads(1, body)


def test_an_object_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(CommError, match="list of 1 on 2 ranks"):
        run_threads(2, lambda _: comm.all_gather_object([None], 1))


def test_before_init_there_is_one_rank_and_no_group() -> None:
    assert (comm.get_rank(), comm.get_world_size()) == (0, 1)
    with pytest.raises(CommError, match=r"call polyaccel\.init_distributed\(\)"):
        comm.barrier()
