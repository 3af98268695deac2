"""The contract suite of communicators: what every backend must do, whatever carries it.

A backend's test subclasses `CommContract` and defines how ranks are run:

    class TestGloo(CommContract):
        def run(self, world_size, body, *args):
            return self.pools(world_size).run(body, *args)

The bodies are functions of this module, so that they pickle, and use nothing but the contract. Values are small
integers where backends may add in different orders, so that every sum is exact. What ranks see of one that fails is
`testkit.comm.faults`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from polyaccel.comm.api import functions
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, PolyaccelError, ShardingError
from polyaccel.testkit.comm.bookkeeping import (
    calls_keep_no_memory,
    finished_calls_leave_nothing_behind,
    host_groups_work_next_to_their_parent,
    results_are_marked_written,
)
from polyaccel.testkit.comm.even import (
    all_gather_puts_parts_side_by_side,
    all_reduce_combines_everywhere,
    all_to_all_transposes,
    broadcast_comes_from_any_root,
    reduce_scatter_keeps_the_own_part,
    views_at_odd_places_travel,
)
from polyaccel.testkit.comm.faults import disagreement_is_seen_by_all
from polyaccel.testkit.comm.uneven import (
    all_gather_takes_uneven_parts,
    all_to_all_takes_pieces,
    all_to_all_takes_uneven_parts,
    batches_of_messages_wait_for_no_order,
    gather_and_scatter_have_any_root,
    reduce_scatter_takes_uneven_parts,
    wrong_counts_are_refused_on_the_spot,
)
from polyaccel.testkit.comm.values import SIZES, combined, dtypes_of, expect, get, put, refused, values_of
from polyaccel.testkit.comparison import equal, same_numbers


class CommContract(ABC):
    """Tests that a communicator obeys its contract; every method `test_*` is a test, run at each of `world_sizes`."""

    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)

    @abstractmethod
    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on each rank of a group. Blocks until all have ended.

        Args:
            world_size: Ranks of the group.
            body: Called with the rank's communicator and `args`. It pickles where ranks are processes.
            *args: Further arguments, which pickle.

        Returns:
            The results in rank order. A failing rank's exception is raised.
        """

    def check(self, body: Callable[..., Any], *, world_sizes: tuple[int, ...] | None = None) -> None:
        """Run a body at every world size.

        Args:
            body: Called with a communicator. It returns how many checks it made.
            world_sizes: Numbers of ranks; None for `self.world_sizes`.

        Raises:
            AssertionError: A rank made no check.
        """
        for world_size in world_sizes or self.world_sizes:
            counts = self.run(world_size, body)
            if len(counts) != world_size or not all(counts):
                raise AssertionError(f"{body.__name__} checked nothing on some of {world_size} ranks: {counts}")

    def test_all_reduce(self) -> None:
        """Every type, reduction and length gives each rank the combination of all: gradients are summed so."""
        self.check(all_reduce_combines_everywhere)

    def test_reduce_scatter(self) -> None:
        """Each rank keeps its own part of the combination, in place or not, and a source that is not its target stays
        as it was: sharded gradients come so."""
        self.check(reduce_scatter_keeps_the_own_part)

    def test_all_gather(self) -> None:
        """The ranks' parts stand side by side in rank order, in place or not: parameters are published so."""
        self.check(all_gather_puts_parts_side_by_side)

    def test_broadcast(self) -> None:
        """Any rank's values reach all: the first parameters are rank 0's."""
        self.check(broadcast_comes_from_any_root)

    def test_all_to_all(self) -> None:
        """Part j of rank i becomes part i of rank j: experts and sequences are exchanged so."""
        self.check(all_to_all_transposes)

    def test_uneven_all_gather(self) -> None:
        """Parts of unlike lengths, empty ones among them, stand side by side, for parameters do not divide evenly."""
        self.check(all_gather_takes_uneven_parts)

    def test_uneven_reduce_scatter(self) -> None:
        """Parts of unlike lengths are reduced to the bits that an all-reduce has, for parameters do not divide
        evenly."""
        self.check(reduce_scatter_takes_uneven_parts)

    def test_uneven_all_to_all(self) -> None:
        """Every pair exchanges its own number of elements, for tokens choose their experts."""
        self.check(all_to_all_takes_uneven_parts)
        self.check(all_to_all_takes_pieces)

    def test_gather_and_scatter(self) -> None:
        """Any root collects and hands out parts, even and uneven, in place or not."""
        self.check(gather_and_scatter_have_any_root)

    def test_parts_at_odd_places(self) -> None:
        """Views that begin at odd elements are sent and received like others, and what surrounds them stays as it was:
        slices begin anywhere."""
        self.check(views_at_odd_places_travel)

    def test_batches(self) -> None:
        """Sends and receives of one batch are under way at once, so that no order of them makes ranks wait in a
        circle."""
        self.check(batches_of_messages_wait_for_no_order)

    def test_wrong_counts(self) -> None:
        """Counts that cannot be are refused before anything is sent, by a ShardingError or CommError: the ranks can
        continue together."""
        self.check(wrong_counts_are_refused_on_the_spot)

    def test_messages(self) -> None:
        """Messages of a pair keep their order: pipelines stand on it."""
        self.check(messages_arrive_in_order)

    def test_objects(self) -> None:
        """Plain values of any size reach all ranks: configs and manifests travel so."""
        self.check(objects_of_any_size_travel)

    def test_split(self) -> None:
        """Groups of some ranks work together with that of all, and a group can be split again: meshes are made so."""
        self.check(sub_groups_work_beside_their_parent)
        self.check(groups_of_groups_that_overlap_work, world_sizes=self.world_sizes[-1:])

    def test_host_group(self) -> None:
        """Ranks agree in host memory while calls are under way."""
        self.check(host_groups_work_next_to_their_parent)

    def test_many_in_flight(self) -> None:
        """Many calls under way at once, waited for in another order, keep their own data: the engine overlaps
        buckets."""
        self.check(many_in_flight_do_not_mix)

    def test_waiting_in_different_orders(self) -> None:
        """No rank's wait needs another's: ranks wait when they need a result."""
        self.check(ranks_may_wait_at_different_times)

    def test_reductions_agree_bitwise(self) -> None:
        """A communicator with `deterministic` adds in the order that it states, wherever a buffer is cut: stages agree
        to the bit by it, which shows from three ranks on."""
        self.check(deterministic_reductions_agree_bitwise)

    def test_results_are_marked_written(self) -> None:
        """What a call wrote is counted in the buffer's generation: frontends see by it that parameters have changed."""
        self.check(results_are_marked_written)

    def test_nonsense_is_refused(self) -> None:
        """Calls that mean nothing are refused on the spot, by a ShardingError or CommError, so that the ranks can
        continue together."""
        self.check(nonsense_is_refused_on_the_spot)

    def test_disagreement(self) -> None:
        """In debug mode ranks that call different things receive what each called, and can continue."""
        self.check(disagreement_is_seen_by_all)

    def test_nothing_is_left_over(self) -> None:
        """Ended calls leave no work, buffer, thread or open file behind: a run makes millions."""
        self.check(finished_calls_leave_nothing_behind)

    def test_memory_does_not_grow(self) -> None:
        """Ended calls leave no memory behind, in this process or on the device: a run makes millions."""
        self.check(calls_keep_no_memory, world_sizes=self.world_sizes[-1:])

    def test_close(self) -> None:
        """A closed group refuses calls by a CommError, and may be closed again."""
        self.check(a_closed_group_refuses_calls)


def messages_arrive_in_order(comm: Communicator) -> int:
    """Three messages to the next rank at once, then a synchronous exchange of the first two ranks."""
    if comm.world_size == 1:
        return refused(CommError, lambda: comm.send(comm.allocate(5, DType.FLOAT32), 0), "a message to itself")
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    inbox = [comm.allocate(5, DType.FLOAT32) for _ in range(3)]
    works = [comm.recv(buffer, before, async_op=True) for buffer in inbox]
    for salt in range(3):
        works.append(comm.send(put(comm, values_of(comm.rank, 5, salt=salt), DType.FLOAT32), after, async_op=True))
    for work in works:
        work.wait()
    checks = sum(expect(comm, inbox[i], values_of(before, 5, salt=i), f"message {i}") for i in range(3))
    if comm.rank == 0:
        comm.send(put(comm, [1, 2], DType.INT32), 1)
    if comm.rank == 1:
        answer = comm.allocate(2, DType.INT32)
        comm.recv(answer, 0)
        checks += expect(comm, answer, np.array([1, 2]), "a synchronous message")
    return checks


def objects_of_any_size_travel(comm: Communicator) -> int:
    last = comm.world_size - 1
    for size in (0, 100, 3_000, 100_000):
        everybody = [{"rank": rank, "pair": (None, b"x" * (size * rank))} for rank in range(comm.world_size)]
        mine = everybody[comm.rank]
        where = f"of {size} bytes a rank, on rank {comm.rank}"
        equal(comm.all_gather_object(mine), everybody, f"all_gather_object {where}")
        equal(comm.broadcast_object(mine, root=last), everybody[last], f"broadcast_object {where}")
        gathered = everybody if comm.rank == last else None
        equal(comm.gather_object(mine, root=last), gathered, f"gather_object {where}")
        equal(comm.scatter_object(everybody if comm.rank == 0 else None), mine, f"scatter_object {where}")
    return 4


def sub_groups_work_beside_their_parent(comm: Communicator) -> int:
    last = comm.world_size - 1
    members = [0, last][: comm.world_size]
    pair = comm.split(members)
    alone = comm.split([last])
    if (pair is None) != (comm.rank not in (0, last)) or (alone is None) != (comm.rank != last):
        raise AssertionError(f"rank {comm.rank} is in the wrong groups: {pair}, {alone}")
    checks = 0
    everybody = put(comm, values_of(comm.rank, 7), DType.FLOAT32)
    outer = comm.all_reduce(everybody, async_op=True)
    if pair is not None:
        if pair.ranks != tuple(comm.ranks[rank] for rank in members) or pair.ranks[pair.rank] != comm.ranks[comm.rank]:
            raise AssertionError(
                f"a sub-group on rank {comm.rank}: expected members {[comm.ranks[rank] for rank in members]}, "
                f"got {pair.ranks} and place {pair.rank} in it"
            )
        inner = put(pair, values_of(comm.rank, 7), DType.FLOAT32)
        pair.all_reduce(inner)
        checks += expect(
            comm, inner, np.sum([values_of(rank, 7) for rank in members], axis=0), "all_reduce in a sub-group"
        )
        again = pair.split(range(len(members)))
        if again is None or again.all_gather_object(comm.rank) != members:
            raise AssertionError("a group of a group")
    if alone is not None:
        own = put(alone, [comm.rank], DType.FLOAT32)
        alone.all_reduce(own)
        checks += expect(comm, own, np.array([comm.rank]), "all_reduce alone")
    outer.wait()
    comm.barrier()
    return checks + expect(comm, everybody, combined(comm, 7, ReduceOp.SUM), "the parent's all_reduce")


def many_in_flight_do_not_mix(comm: Communicator) -> int:
    flights = []
    for salt in range(24):
        numel = SIZES[1 + salt % 4]
        buffer = put(comm, values_of(comm.rank, numel * comm.world_size, salt=salt), DType.FLOAT32)
        expected = combined(comm, numel * comm.world_size, ReduceOp.SUM, salt=salt)
        if salt % 2:
            work = comm.all_reduce(buffer, async_op=True)
        else:
            own = slice(comm.rank * numel, (comm.rank + 1) * numel)
            whole, buffer, expected = buffer, comm.allocate(numel, DType.FLOAT32), expected[own]
            work = comm.reduce_scatter(buffer, whole, async_op=True)
        flights.append((work, buffer, expected))
    for work, _, _ in reversed(flights):
        work.wait()
        work.wait()  # twice is allowed
    if not all(work.is_done() for work, _, _ in flights):
        raise AssertionError("is_done() of works that were waited for: expected True, got False")
    return sum(expect(comm, buffer, expected, "one of many") for _, buffer, expected in flights)


def ranks_may_wait_at_different_times(comm: Communicator) -> int:
    """Rank 0 waits at once, the others only after another collective: no wait may need a peer's wait."""
    first = put(comm, values_of(comm.rank, SIZES[-1]), DType.FLOAT32)
    second = put(comm, values_of(comm.rank, 9, salt=1), DType.FLOAT32)
    work = comm.all_reduce(first, async_op=True)
    if comm.rank == 0:
        work.wait()
    comm.all_reduce(second)
    work.wait()
    checks = expect(comm, first, combined(comm, SIZES[-1], ReduceOp.SUM), "the first")
    return checks + expect(comm, second, combined(comm, 9, ReduceOp.SUM, salt=1), "the second")


def deterministic_reductions_agree_bitwise(comm: Communicator) -> int:
    """All-reduce, reduce-scatter and any cutting give the bits of a sum in the order that the communicator states;
    nothing is claimed where it is not deterministic."""
    if not comm.deterministic:
        return 1
    checks = 0
    for dtype in (one for one in dtypes_of(comm) if one in (DType.FLOAT32, DType.BFLOAT16)):
        numel = 10_007 * comm.world_size
        mine = put(comm, np.random.default_rng(comm.rank).standard_normal(numel) * 1e3, dtype)
        everybody = [np.random.default_rng(rank).standard_normal(numel) * 1e3 for rank in range(comm.world_size)]
        terms = [get(comm, put(comm, values, dtype)).astype(np.float32) for values in everybody]
        first = [reduce(np.add, [terms[rank] for rank in members]) for members in comm.summed_first]
        rounded = [get(comm, put(comm, total, dtype)).astype(np.float32) for total in first]
        in_order = get(comm, put(comm, reduce(np.add, rounded or terms), dtype))
        whole, pieces = put(comm, get(comm, mine), dtype), put(comm, get(comm, mine), dtype)
        comm.all_reduce(whole)
        for start, end in ((0, 1), (1, 9_000), (9_000, numel)):
            comm.all_reduce(pieces.view(start, end - start))
        part = comm.allocate(10_007, dtype)
        comm.reduce_scatter(part, mine)
        for found, expected in (
            (whole, in_order),
            (pieces, in_order),
            (part, in_order[comm.rank * 10_007 : (comm.rank + 1) * 10_007]),
        ):
            what = f"{dtype} on rank {comm.rank}: a sum in the order that the communicator states"
            same_numbers(get(comm, found), expected, what)
            checks += 1
    return checks


def nonsense_is_refused_on_the_spot(comm: Communicator) -> int:
    """Before anything is sent: the ranks can continue together afterwards."""
    n = comm.world_size
    floats, ints = comm.allocate(4 * n, DType.FLOAT32), comm.allocate(4, DType.INT32)
    checks = refused(ShardingError, lambda: comm.all_reduce(ints, ReduceOp.AVG), "an average of integers")
    checks += refused(ShardingError, lambda: comm.reduce_scatter(floats.view(0, 3), floats), "an uneven reduce_scatter")
    checks += refused(ShardingError, lambda: comm.all_gather(floats, ints), "an all_gather of another type")
    misplaced = floats.view(4 * ((comm.rank + 1) % n), 4)
    if n > 1:
        checks += refused(
            ShardingError, lambda: comm.all_gather(floats, misplaced), "an in-place part at another place"
        )
    if comm.accelerator.capabilities().mutable_buffers:  # elsewhere arrays have no strides
        torn = comm.accelerator.allocate(8, DType.FLOAT32, pinned=True).raw[::2]
        checks += refused(PolyaccelError, lambda: functions.all_reduce(torn, group=comm), "what is not contiguous")
    checks += refused(CommError, lambda: comm.broadcast(floats, n), "a root outside the group")
    checks += refused(CommError, lambda: comm.split([0, 0]), "a group with a rank twice")
    comm.barrier()
    return checks


def groups_of_groups_that_overlap_work(comm: Communicator) -> int:
    """Ranks that are in unequally many groups still form the next one together."""
    n, checks = comm.world_size, 1
    first, second = list(range(n - 1)) or [0], list(range(1, n)) or [0]
    groups = [comm.split(first), comm.split(second)]
    for group in list(groups):
        if group is not None and group.world_size > 2:
            groups += [group.split([0, 1]), group.split([1, group.world_size - 1])]
    groups.append(comm.split(list(range(n))))
    for group in groups:
        if group is not None:
            shared = group.all_gather_object(comm.rank)
            if [group.ranks[place] for place in range(group.world_size)] != [comm.ranks[rank] for rank in shared]:
                raise AssertionError(f"the group {list(group.ranks)} has the ranks {shared}")
            checks += 1
    for group in groups:
        if group is not None and group is not comm:
            group.close()
    comm.barrier()
    return checks


def a_closed_group_refuses_calls(comm: Communicator) -> int:
    part = comm.split(list(range(comm.world_size)))
    if part is None:
        raise AssertionError("a group of everybody lacks this rank")
    part.barrier()
    part.close()
    part.close()
    if comm.world_size == 1:
        return 1  # there is no rank to leave
    return refused(CommError, lambda: part.all_reduce(comm.allocate(1, DType.FLOAT32)), "a call on a closed group")
