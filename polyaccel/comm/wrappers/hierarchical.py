"""One group over several hosts: inside a host by what is fast there, across hosts by what reaches them.

[Note: Two-level collectives]
The ranks that have the same number on their hosts form a group across hosts, so there are as many of those groups as
ranks on a host, and all of them use the network at once. A reduction adds inside each host first; then each rank sends
only the part that it answers for, 1/L of what a flat reduction sends with L ranks on a host. Gathers go the other way
round. Element by element the result is (host 0's ranks in order) + (host 1's) + ..., rounded to the element type
where a host's sum leaves it, whatever the sizes; an average is the average of the hosts' averages, which does not
overflow where the sum would. Messages are direct.

An all-to-all of short parts passes them on: what is for any rank of a host goes to the one there that has the sender's
place, which gives it to its host, so a rank sends H-1 messages to other hosts and not (H-1) L. Between hosts comes
first, for it goes from where the parts are and waits for no rank of this host. Where parts are uneven, only the ends
have the sizes that are passed on, so receivers first send these to the ranks of their host. Of long parts the bytes
count and not their number: they go directly. So do uneven ones unless it is established that none is long
(`Collective.max_send_numel`), for they must agree which way to take, and those of two ranks on a host, for sending the
sizes costs as much as the one message that would be saved.

Collectives of two levels run one after another on a helper thread when they are asynchronous, and in the caller's
otherwise, as in [Note: Waiting in shared memory]; hence for host memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, pairwise
from struct import pack, unpack
from typing import ClassVar

from polyaccel.comm.arguments import Counts, check_members
from polyaccel.comm.base import Communicator, StatusStore
from polyaccel.comm.collective import ALL_OPERATIONS, UNEVEN_PARTS, Collective, Operation, closed_error, ended
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.comm.work import DONE, Background, DeferredWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CommError

_SMALL_NBYTES = 32 << 10  # up to here two all-reduces of the whole beat three collectives of parts
# A part of an all-to-all may be so long for each message that passing it on saves a rank, a host: longer ones are not
# worth copying twice more (bench/RESULTS.md, "All-to-alls between hosts").
_SHORT_NBYTES = 16 << 10
Span = tuple[int, int]
"""A run of elements: where it begins in its buffer, and how many there are."""


class HierarchicalCommunicator(Communicator):
    """The group of `flat`, whose ranks on host h are `hosts[h]`, equally many on each and more than one.

    `intra` joins the ranks of this host, in the order of `hosts[h]`, and `inter` those with this rank's place on every
    host, in the order of hosts. `flat` carries what has one level. All three belong to this communicator from now on.
    """

    native_ops: ClassVar[frozenset[Operation]] = ALL_OPERATIONS
    native_uneven_ops: ClassVar[frozenset[Operation]] = UNEVEN_PARTS - {Operation.ALL_GATHER, Operation.REDUCE_SCATTER}

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
                hint="use the flat communicator where hosts are uneven",
                value=self.hosts,
            )
        self.flat = flat
        self.intra = intra
        self.inter = inter
        self.coalesces_small_sends = _short_nbytes(intra.world_size, is_uneven=True) > 0
        self._host_and_index = {
            rank: (h, index) for h, members in enumerate(self.hosts) for index, rank in enumerate(members)
        }
        self._scratch = ScratchPool(flat.accelerator)
        self._helper: Background | None = None
        self._closed = False

    def start(self, collective: Collective) -> Work:
        collective.check(self.rank, self.world_size)
        run = _TWO_LEVELS.get(collective.operation)
        if run is None or (collective.operation is Operation.ALL_TO_ALL and not self._is_short(collective)):
            return self.flat.call(collective)
        return self._start(collective, partial(run, self, collective))

    def _all_reduce(self, collective: Collective) -> None:
        buffer = collective.buffer_received()
        numel = buffer.numel // self.intra.world_size if buffer.nbytes > _SMALL_NBYTES else 0
        whole = buffer.view(0, numel * self.intra.world_size)
        rest = buffer.view(whole.numel, buffer.numel - whole.numel)
        if numel:
            own = whole.view(self.intra.rank * numel, numel)
            self._call(self.intra, collective, Operation.REDUCE_SCATTER, whole, own)
            self._call(self.inter, collective, Operation.ALL_REDUCE, own, own)
            self._call(self.intra, collective, Operation.ALL_GATHER, own, whole)
        if rest.numel or not numel:
            self._call(self.intra, collective, Operation.ALL_REDUCE, rest, rest)
            self._call(self.inter, collective, Operation.ALL_REDUCE, rest, rest)

    def _reduce_scatter(self, collective: Collective) -> None:
        source, out = collective.buffer_sent(), collective.buffer_received()
        numel = out.numel
        sums = self._scratch.take(numel * len(self.hosts), out.dtype)
        for host, members in enumerate(self.hosts):
            with self._run_of(source, [(rank * numel, numel) for rank in members]) as parts:
                self._call(self.intra, collective, Operation.REDUCE_SCATTER, parts, sums.view(host * numel, numel))
        of_hosts = sums.view(0, numel * len(self.hosts))
        self._call(self.inter, collective, Operation.REDUCE_SCATTER, of_hosts, out)
        self._scratch.give_back(sums)

    def _all_gather(self, collective: Collective) -> None:
        source, out = collective.buffer_sent(), collective.buffer_received()
        numel = source.numel
        block = self._scratch.take(numel * len(self.hosts), out.dtype)
        self._call(self.inter, collective, Operation.ALL_GATHER, source, block.view(0, numel * len(self.hosts)))
        for host, members in enumerate(self.hosts):
            with self._run_of(out, [(rank * numel, numel) for rank in members], fills=True) as parts:
                self._call(self.intra, collective, Operation.ALL_GATHER, block.view(host * numel, numel), parts)
        self._scratch.give_back(block)

    def _broadcast(self, collective: Collective) -> None:
        buffer = collective.buffer_received()
        host, index = self._host_and_index[collective.root]
        if self.intra.rank == index:
            self._call(self.inter, collective, Operation.BROADCAST, buffer, buffer, host)
        self._call(self.intra, collective, Operation.BROADCAST, buffer, buffer, index)

    def _barrier(self, collective: Collective) -> None:
        self._call(self.intra, collective, Operation.BARRIER)  # this host is here
        self._call(self.inter, collective, Operation.BARRIER)  # and so is every other one

    def _is_short(self, collective: Collective) -> bool:
        """Return whether, by what all ranks hold, the parts of this all-to-all are short and there are any."""
        longest = collective.max_send_numel if collective.is_uneven else collective.numel // self.world_size
        most = _short_nbytes(self.intra.world_size, is_uneven=collective.is_uneven)
        return longest is not None and 0 < longest * collective.buffer_received().dtype.itemsize <= most

    def _all_to_all(self, collective: Collective) -> None:
        source, out = collective.buffer_sent(), collective.buffer_received()
        going, coming = (
            [(start, end - start) for start, end in pairwise(bounds)]
            for bounds in (collective.source_bounds(self.world_size), collective.bounds(self.world_size))
        )
        wanted = self._wanted(collective, [numel for _, numel in coming])
        leaving = tuple(sum(going[rank][1] for rank in members) for members in self.hosts)
        arriving = tuple(map(sum, wanted))
        block = self._scratch.take(sum(arriving), out.dtype)
        passed = block.view(0, sum(arriving))
        with self._run_of(source, [going[rank] for rank in chain(*self.hosts)]) as sent:
            self._call(self.inter, collective, Operation.ALL_TO_ALL, sent, passed, counts=(arriving, leaving))
        starts = accumulate(arriving, initial=0)
        for members, start, given in zip(self.hosts, starts, wanted, strict=False):
            parts, counts = passed.view(start, sum(given)), tuple(coming[rank][1] for rank in members)
            with self._run_of(out, [coming[rank] for rank in members], fills=True) as run:
                self._call(self.intra, collective, Operation.ALL_TO_ALL, parts, run, counts=(counts, given))
        self._scratch.give_back(block)

    def _wanted(self, collective: Collective, coming: Sequence[int]) -> list[Counts]:
        """Return, by host, the elements that its ranks expect from the rank in this one's place there."""
        hosts, ranks = len(self.hosts), self.intra.world_size
        if not collective.is_uneven:
            return [tuple(coming[:ranks])] * hosts
        block = self._scratch.take(2 * self.world_size, DType.INT64)
        mine, theirs = (block.view(start, self.world_size) for start in (0, self.world_size))
        mine.from_bytes(pack(f"<{self.world_size}q", *(coming[rank] for rank in chain(*zip(*self.hosts, strict=True)))))
        self._call(self.intra, collective, Operation.ALL_TO_ALL, mine, theirs)
        numbers = unpack(f"<{self.world_size}q", theirs.to_bytes())
        self._scratch.give_back(block)
        return [numbers[host::hosts] for host in range(hosts)]

    @contextmanager
    def _run_of(self, whole: Buffer, spans: Sequence[Span], *, fills: bool = False) -> Iterator[Buffer]:
        """Yield `spans` of `whole` side by side, in place or as a copy that is written back if it `fills` them."""
        spans = [span for span in spans if span[1]]
        numel = sum(length for _, length in spans)
        if all(start + length == after for (start, length), (after, _) in pairwise(spans)):
            yield whole.view(spans[0][0] if spans else 0, numel)
            return
        block = self._scratch.take(numel, whole.dtype)
        starts = accumulate((length for _, length in spans), initial=0)
        pieces = [(whole.view(*span), block.view(at, span[1])) for span, at in zip(spans, starts, strict=False)]
        for there, here in pieces if not fills else ():
            here.copy_from(there)
        yield block.view(0, numel)
        for there, here in pieces if fills else ():
            there.copy_from(here)
        self._scratch.give_back(block)

    def _call(
        self,
        group: Communicator,
        collective: Collective,
        operation: Operation,
        source: Buffer | None = None,
        target: Buffer | None = None,
        root: int = 0,
        counts: tuple[Counts, Counts] | tuple[None, None] = (None, None),
    ) -> None:
        """One step of `collective` inside `group`, which has its number; `counts` are those received and sent."""
        whole = source if operation is Operation.REDUCE_SCATTER else target
        step = collective.on(source, target)
        step.operation, step.root, step.async_op = operation, root, False
        step.numel, step.dtype = (0, None) if whole is None else (whole.numel, whole.dtype)
        (step.counts, step.source_counts), step.max_send_numel = counts, None
        group.call(step)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Shared by one host: `intra`'s kind of group; by several evenly: of two levels again; else `flat`'s."""
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        positions: dict[int, list[int]] = {}
        for position, rank in enumerate(members):
            positions.setdefault(self._host_and_index[rank][0], []).append(position)
        mine = positions.get(self._host_and_index[self.rank][0], [])
        found: list[Communicator | None] = []
        collective = Collective(Operation.SPLIT, number=self.next_number(), members=members)

        def run() -> None:
            flat = self.flat.split(members) if len(positions) > 1 else None
            near = None
            if len(positions) == 1 or is_two_level(list(positions.values())):
                near = self.intra.split([self._host_and_index[members[at]][1] for at in mine]) if mine else None
            if flat is not None and near is not None:
                found.append(two_level(flat, near, list(positions.values())))
            else:
                found.append(near or flat)

        with self.inside(collective.number), self.flat.inside(collective.number), self.intra.inside(collective.number):
            self._start(collective, run)
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

    def board(self) -> StatusStore | None:
        return self.flat.board()

    def _start(self, collective: Collective, run: Callable[[], None]) -> Work:
        if self._closed:
            raise closed_error(collective)
        if not collective.async_op and (self._helper is None or self._helper.is_idle):
            run()
            return DONE
        if self._helper is None:
            self._helper = Background("polyaccel two levels")
        return ended(self._helper.carry(DeferredWork(run)), collective)


_TWO_LEVELS: Mapping[Operation, Callable[[HierarchicalCommunicator, Collective], None]] = {
    Operation.ALL_REDUCE: HierarchicalCommunicator._all_reduce,
    Operation.REDUCE_SCATTER: HierarchicalCommunicator._reduce_scatter,
    Operation.ALL_GATHER: HierarchicalCommunicator._all_gather,
    Operation.BROADCAST: HierarchicalCommunicator._broadcast,
    Operation.BARRIER: HierarchicalCommunicator._barrier,
    Operation.ALL_TO_ALL: HierarchicalCommunicator._all_to_all,
}


def is_two_level(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether ranks on these hosts gain by two levels: several hosts, and more than one rank on each, equally many."""
    sizes = {len(members) for members in hosts}
    return len(hosts) > 1 and len(sizes) == 1 and sizes != {1}


def two_level(flat: Communicator, intra: Communicator, hosts: Sequence[Sequence[int]]) -> HierarchicalCommunicator:
    """`flat`'s group with `intra` inside this host; `hosts[h]` are the ranks (of `flat`) of host h. Collective."""
    inter = None
    for peers in zip(*hosts, strict=True):
        inter = flat.split(peers) or inter
    if inter is None:
        raise CommError(f"rank {flat.rank} is on none of the hosts {list(hosts)}", value=hosts)
    return HierarchicalCommunicator(flat, intra, inter, hosts)


def _short_nbytes(ranks: int, *, is_uneven: bool) -> int:
    """Return the longest part to pass on; sending lengths of uneven parts takes as long as a message."""
    return (ranks - 1 - is_uneven) * _SHORT_NBYTES
