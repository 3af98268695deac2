"""The torch-shaped functions: tensors and buffers, global ranks, and calls outside a group."""

from __future__ import annotations

import pytest
import torch

from polyaccel import comm
from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads


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


def test_split_sizes_count_along_the_first_dim() -> None:
    def body(_: Communicator) -> None:
        rank, n = comm.get_rank(), comm.get_world_size()
        rows = [(rank + to) % 3 for to in range(n)]
        arrives = [(source + rank) % 3 for source in range(n)]
        tensor = torch.arange(2.0 * sum(rows)).reshape(-1, 2) + 100 * rank
        found = torch.zeros(sum(arrives), 2)
        work = comm.all_to_all_single(found, tensor, arrives, rows, async_op=True)
        assert work is not None
        work.wait()
        for source, part in enumerate(found.split(arrives)):
            before = sum((source + to) % 3 for to in range(rank))
            assert part.flatten().tolist() == [100.0 * source + 2 * before + i for i in range(part.numel())]
        even = torch.zeros(n)
        comm.all_to_all_single(even, torch.full((n,), float(rank)), input_split_sizes=[1] * n)
        assert even.tolist() == [float(i) for i in range(n)]

    run_threads(3, body)


def test_gather_and_scatter_take_lists_on_one_rank() -> None:
    def body(_: Communicator) -> None:
        rank, n = comm.get_rank(), comm.get_world_size()
        tensor = torch.full((2, 2), float(rank))
        parts = [torch.zeros(2, 2) for _ in range(n)] if rank == 1 else None
        comm.gather(tensor, parts, dst=1)
        assert parts is None or [part.tolist() for part in parts] == [[[float(i)] * 2] * 2 for i in range(n)]
        work = comm.scatter(tensor, parts and [part + 10 for part in parts], src=1, async_op=True)
        assert work is not None
        work.wait()
        assert tensor.tolist() == [[10.0 + rank] * 2] * 2
        if rank == 1:
            with pytest.raises(ShardingError) as caught:
                comm.gather(tensor, [tensor], dst=1)
            assert caught.value.value == 1
            assert "float32" in str(caught.value)
        group = comm.new_group([0, 2])
        assert comm.gather(tensor, [tensor, tensor.clone()] if rank == 0 else None, dst=0, group=group) is None

    run_threads(3, body)


def test_messages_in_a_batch_are_under_way_at_once() -> None:
    def body(_: Communicator) -> None:
        rank, n = comm.get_rank(), comm.get_world_size()
        sent, inbox = torch.full((3,), float(rank)), torch.zeros(3)
        works = comm.batch_isend_irecv(
            [comm.P2POp(comm.isend, sent, (rank + 1) % n), comm.P2POp(comm.irecv, inbox, (rank - 1) % n)]
        )
        for work in works:
            work.wait()
        assert inbox.tolist() == [float((rank - 1) % n)] * 3
        with pytest.raises(CommError) as caught:
            comm.P2POp(comm.send, sent, 0)
        assert "polyaccel.comm.isend" in str(caught.value)
        with pytest.raises(CommError) as caught:
            comm.batch_isend_irecv([])
        assert caught.value.value == 0

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
            with pytest.raises(CommError) as caught:
                comm.get_global_rank(group, 0)
            assert caught.value.value == 0
        else:
            assert comm.get_global_rank(group, comm.get_rank(group)) == comm.get_rank()
            assert tensor.tolist() == [4.0, 4.0]
            with pytest.raises(CommError) as caught:
                comm.broadcast(tensor, 0, group)
            assert caught.value.value == 0
            assert all(part in str(caught.value) for part in ("rank 0", "ranks [1, 2]"))
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

    with pytest.raises(ShardingError) as caught:
        run_threads(1, body)
    assert caught.value.value == (1, 4)


def test_an_object_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(CommError) as caught:
        run_threads(2, lambda _: comm.all_gather_object([None], 1))
    assert caught.value.value == 1


def test_before_init_there_is_one_rank_and_no_group() -> None:
    assert (comm.get_rank(), comm.get_world_size()) == (0, 1)
    with pytest.raises(CommError) as caught:
        comm.barrier()
    assert "polyaccel.init_distributed()" in str(caught.value)
