"""One group over several hosts: inside a host by what is fast there, across hosts by what reaches them.

[Note: Two levels]
The ranks that have the same number on their hosts form a group across hosts, so there are as many of those groups as
ranks on a host, and all of them use the network at once. A reduction adds inside each host first; then each rank sends
only the part that it answers for, 1/L of what a flat reduction sends with L ranks on a host. Gathers go the other way
round. Element by element the result is (host 0's ranks in order) + (host 1's) + ..., rounded to the element type
where a host's sum leaves it, whatever the sizes; an average is the average of the hosts' averages, which does not
overflow where the sum would. Messages and all-to-alls are direct.

Collectives of two levels run one after another on a helper thread when they are asynchronous, and in the caller's
otherwise, as in [Note: Shared memory, who waits]; hence for host memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import Call, check_members, check_reduction, check_root, closed_error, is_own_part
from polyaccel.comm.background import Background, DeferredWork
from polyaccel.comm.base import NO_INFO, Board, CallInfo, Communicator, DoneWork, Work, check_collective
from polyaccel.comm.objects import gather_objects
from polyaccel.comm.scratch import ScratchPool
from polyaccel.errors import CommError
from polyaccel.types import DType, ReduceOp

_DONE = DoneWork()
_SMALL_NBYTES = 32 << 10  # up to here two all-reduces of the whole beat three collectives of parts


class HierarchicalCommunicator(Communicator):
    """The group of `flat`, whose ranks on host h are `hosts[h]`, equally many on each and more than one.

    `intra` joins the ranks of this host, in the order of `hosts[h]`, and `inter` those with this rank's place on every
    host, in the order of hosts. `flat` carries what has one level. All three belong to this communicator from now on.
    """

    def __init__(
        self, flat: Communicator, intra: Communicator, inter: Communicator, hosts: Sequence[Sequence[int]]
    ) -> None:
        self.rank = flat.rank
        self.world_size = flat.world_size
        self.ranks = flat.ranks
        self.backend = f"{intra.backend}+{flat.backend}"
        self.accelerator = flat.accelerator
        self.timeout_s = flat.timeout_s
        self.hosts = tuple(tuple(members) for members in hosts)
        self.deterministic = intra.deterministic and inter.deterministic
        self.summed_first = self.hosts
        if {len(members) for members in self.hosts} != {intra.world_size} or len(self.hosts) != inter.world_size:
            raise CommError(
                f"hosts of {[len(members) for members in self.hosts]} ranks are not {inter.world_size} hosts of "
                f"{intra.world_size}",
                cure="use the flat communicator where hosts are uneven",
                value=self.hosts,
            )
        self.flat = flat
        self.intra = intra
        self.inter = inter
        self._places = {rank: (h, index) for h, members in enumerate(self.hosts) for index, rank in enumerate(members)}
        self._scratch = ScratchPool(flat.accelerator)
        self._helper: Background | None = None
        self._closed = False

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        check_reduction("all_reduce", buffer.dtype, op)

        def run() -> None:
            numel = buffer.numel // self.intra.world_size if buffer.nbytes > _SMALL_NBYTES else 0
            whole = buffer.view(0, numel * self.intra.world_size)
            rest = buffer.view(whole.numel, buffer.numel - whole.numel)
            if numel:
                own = whole.view(self.intra.rank * numel, numel)
                self.intra.reduce_scatter(own, whole, op, info=info)
                self.inter.all_reduce(own, op, info=info)
                self.intra.all_gather(whole, own, info=info)
            if rest.numel or not numel:
                self.intra.all_reduce(rest, op, info=info)
                self.inter.all_reduce(rest, op, info=info)

        return self._start(Call("all_reduce", buffer.numel, buffer.dtype, op.value, info), run, async_op)

    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        info: CallInfo = NO_INFO,
    ) -> Work:
        check_collective("reduce_scatter", out, source, world_size=self.world_size, parts_of="source")
        check_reduction("reduce_scatter", source.dtype, op)
        is_own_part("reduce_scatter", source, out, self.rank)

        def run() -> None:
            numel = out.numel
            sums = self._scratch.take(numel * len(self.hosts), out.dtype)
            for host, members in enumerate(self.hosts):
                block, parts = None, _run_of(source, members, numel)
                if parts is None:
                    block = self._scratch.take(numel * len(members), source.dtype)
                    parts = block.view(0, numel * len(members))
                    for index, rank in enumerate(members):
                        parts.view(index * numel, numel).copy_from(source.view(rank * numel, numel))
                self.intra.reduce_scatter(sums.view(host * numel, numel), parts, op, info=info)
                if block is not None:
                    self._scratch.give_back(block)
            self.inter.reduce_scatter(out, sums.view(0, numel * len(self.hosts)), op, info=info)
            self._scratch.give_back(sums)

        return self._start(Call("reduce_scatter", source.numel, source.dtype, op.value, info), run, async_op)

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_collective("all_gather", out, source, world_size=self.world_size, parts_of="out")
        is_own_part("all_gather", out, source, self.rank)

        def run() -> None:
            numel = source.numel
            block = self._scratch.take(numel * len(self.hosts), out.dtype)
            self.inter.all_gather(block.view(0, numel * len(self.hosts)), source, info=info)
            for host, members in enumerate(self.hosts):
                mine, parts = block.view(host * numel, numel), _run_of(out, members, numel)
                if parts is not None:
                    self.intra.all_gather(parts, mine, info=info)
                    continue
                packed = self._scratch.take(numel * len(members), out.dtype)
                self.intra.all_gather(packed.view(0, numel * len(members)), mine, info=info)
                for index, rank in enumerate(members):
                    out.view(rank * numel, numel).copy_from(packed.view(index * numel, numel))
                self._scratch.give_back(packed)
            self._scratch.give_back(block)

        return self._start(Call("all_gather", out.numel, out.dtype, info=info), run, async_op)

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("broadcast", root, self.world_size)
        host, index = self._places[root]

        def run() -> None:
            if self.intra.rank == index:
                self.inter.broadcast(buffer, host, info=info)
            self.intra.broadcast(buffer, index, info=info)

        return self._start(Call("broadcast", buffer.numel, buffer.dtype, f"from {root}", info), run, async_op)

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        return self.flat.all_to_all(out, source, async_op=async_op, info=info)

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        return self.flat.send(buffer, to, async_op=async_op, info=info)

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        return self.flat.recv(buffer, source, async_op=async_op, info=info)

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        def run() -> None:
            self.intra.barrier(info=info)  # this host is here
            self.inter.barrier(info=info)  # and so is every other one

        self._start(Call("barrier", info=info), run, False)

    def all_gather_object(self, value: Any) -> list[Any]:
        return gather_objects(self, value)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Shared by one host: `intra`'s kind of group; by several evenly: of two levels again; else `flat`'s."""
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        positions: dict[int, list[int]] = {}
        for position, rank in enumerate(members):
            positions.setdefault(self._places[rank][0], []).append(position)
        mine = positions.get(self._places[self.rank][0], [])
        found: list[Communicator | None] = []

        def run() -> None:
            flat = self.flat.split(members) if len(positions) > 1 else None
            near = None
            if len(positions) == 1 or is_two_level(list(positions.values())):
                near = self.intra.split([self._places[members[at]][1] for at in mine]) if mine else None
            if flat is not None and near is not None:
                found.append(two_level(flat, near, list(positions.values())))
            else:
                found.append(near or flat)

        self._start(Call("split", detail=str(list(members))), run, False)
        return found[0]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._helper is not None:
            self._helper.close()
        for communicator in (self.inter, self.intra, self.flat):
            communicator.close()

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        return self.intra.allocate(numel, dtype)

    def board(self) -> Board | None:
        return self.flat.board()

    def _start(self, call: Call, run: Callable[[], None], async_op: bool) -> Work:
        if self._closed:
            raise closed_error(call)
        if not async_op and (self._helper is None or self._helper.is_idle):
            run()
            return _DONE
        if self._helper is None:
            self._helper = Background("polyaccel two levels")
        work = self._helper.carry(DeferredWork(run))
        if not async_op:
            work.wait()
        return work


def is_two_level(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether ranks on these hosts gain by two levels: several hosts, and more than one rank on each, equally many."""
    sizes = {len(members) for members in hosts}
    return len(hosts) > 1 and len(sizes) == 1 and sizes != {1}


def two_level(flat: Communicator, intra: Communicator, hosts: Sequence[Sequence[int]]) -> HierarchicalCommunicator:
    """`flat`'s group with `intra` inside this host; `hosts[h]` are the ranks (of `flat`) of host h. Collective."""
    inter = None
    for place in zip(*hosts, strict=True):
        inter = flat.split(place) or inter
    if inter is None:
        raise CommError(f"rank {flat.rank} is on none of the hosts {list(hosts)}", value=hosts)
    return HierarchicalCommunicator(flat, intra, inter, hosts)


def _run_of(whole: Buffer, members: Sequence[int], numel: int) -> Buffer | None:
    """The parts of these ranks in `whole` if they lie side by side there, in order; None if they do not."""
    if list(members) != list(range(members[0], members[0] + len(members))):
        return None
    return whole.view(members[0] * numel, numel * len(members))
