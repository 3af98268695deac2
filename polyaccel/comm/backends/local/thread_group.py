"""The rendezvous of threads: the n-th collective of a group is one `ThreadCollective`, to which every rank brings a
value.

No buffers here, only arrivals, time limits, disagreement and failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Condition, Lock
from time import monotonic
from typing import Any, TypeVar

from polyaccel.comm.base import StatusStore
from polyaccel.comm.collective import Collective
from polyaccel.errors import CommError, CommTimeout
from polyaccel.job.host_topology import HostTopology, host_id

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of one rank: on which group (global ranks), and what it was, without its buffers."""

    group: tuple[int, ...]
    collective: Collective


class DictBoard(StatusStore):
    """A notice board for the threads of a process."""

    def __init__(self) -> None:
        self._notes: dict[int, str] = {}

    def set(self, rank: int, text: str) -> None:
        self._notes[rank] = text

    def read(self, world_size: int) -> Mapping[int, str]:
        return {rank: text for rank, text in self._notes.copy().items() if rank < world_size}


class WorldState:
    """State that all groups of a world share: a lock, the time limit, the failure that ended it, traces, the board."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.changed = Condition()
        self.timeout_s = timeout_s
        self.traces: tuple[list[TracedCall], ...] = tuple([] for _ in range(world_size))
        self.board = DictBoard()
        try:
            self._host_id = host_id()
        except OSError:  # no Linux
            self._host_id = ""
        self._failure: tuple[str, BaseException | None] | None = None

    def host_topology(self, rank: int) -> HostTopology:
        """Return the topology of global rank `rank`: all threads are on this host."""
        return HostTopology.one_host(rank, range(len(self.traces)), self._host_id)

    def abort(self, reason: str, cause: BaseException | None) -> None:
        with self.changed:
            if self._failure is None:
                self._failure = (reason, cause)
            self.changed.notify_all()

    def check(self) -> None:
        """Raise what ended the world, if something did."""
        if self._failure is not None:
            reason, cause = self._failure
            raise CommError(reason) from cause


class ThreadGroup:
    """A group of threads: its members' global ranks, and the meetings that are not over."""

    def __init__(self, ranks: tuple[int, ...], state: WorldState) -> None:
        self.ranks = ranks
        self.state = state
        self._counts = [0] * len(ranks)
        self._pair_counts: dict[tuple[int, int, int], int] = {}
        self._meetings: dict[tuple[int, ...], ThreadCollective] = {}

    def join(self, rank: int, collective: Collective, brings: Any) -> ThreadCollective:
        """Arrive at this rank's next collective. Raises CommError when the others are at a different one."""
        with self.state.changed:
            count = self._counts[rank]
            self._counts[rank] += 1
            return self._arrive((count,), tuple(range(len(self.ranks))), rank, collective, brings)

    def join_pair(self, rank: int, source: int, to: int, collective: Collective, brings: Any) -> ThreadCollective:
        """Arrive at this rank's next message from `source` to `to`."""
        with self.state.changed:
            count = self._pair_counts.get((rank, source, to), 0)
            self._pair_counts[rank, source, to] = count + 1
            return self._arrive((count, source, to), (source, to), rank, collective, brings)

    def forget(self, key: tuple[int, ...]) -> None:
        self._meetings.pop(key, None)

    def _arrive(
        self, key: tuple[int, ...], members: tuple[int, ...], rank: int, collective: Collective, brings: Any
    ) -> ThreadCollective:
        self.state.check()
        self.state.traces[self.ranks[rank]].append(TracedCall(self.ranks, collective))
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = ThreadCollective(self, key, members, collective)
        meeting.arrive(rank, collective, brings)
        self.state.changed.notify_all()
        return meeting


class ThreadCollective:
    """One collective: `brought[rank]` is what each member brought, once all are there."""

    def __init__(
        self, group: ThreadGroup, key: tuple[int, ...], members: tuple[int, ...], collective: Collective
    ) -> None:
        self.collective = collective
        self.brought: dict[int, Any] = {}
        self._group = group
        self._key = key
        self._members = members
        self._first: int | None = None
        self._disagreement = ""
        self._left: set[int] = set()
        self._once_lock = Lock()
        self._once: list[Any] = []

    def arrive(self, rank: int, collective: Collective, brings: Any) -> None:
        """Note a member's arrival; the world's lock is held. Raises CommError if its call is not the first one's."""
        if self._first is None:
            self._first = rank
        elif not collective.agrees_with(self.collective):
            ranks = self._group.ranks
            self._disagreement = (
                f"ranks disagree about collective #{collective.number}: rank {ranks[rank]} called "
                f"{collective.described()}, rank {ranks[self._first]} called {self.collective.described()}"
            )
            self._group.state.changed.notify_all()
            self._check_agreed()
        self.brought[rank] = brings

    def is_complete(self) -> bool:
        return len(self.brought) == len(self._members)

    def wait_for_all(self, rank: int) -> None:
        """Block until every member is there. Raises CommTimeout naming those that are not, CommError on failure."""
        state = self._group.state
        deadline = monotonic() + state.timeout_s
        with state.changed:
            while not self.is_complete():
                state.check()
                self._check_agreed()
                remaining_s = deadline - monotonic()
                if remaining_s <= 0:
                    raise self._timed_out(rank)
                state.changed.wait(remaining_s)

    def once(self, compute: Callable[[], T]) -> T:
        """The value of `compute`, run by whichever member asks first."""
        with self._once_lock:
            if not self._once:
                self._once.append(compute())
            result: T = self._once[0]
            return result

    def leave(self, rank: int) -> None:
        """This member has its result; the last one to leave ends the meeting."""
        with self._group.state.changed:
            self._left.add(rank)
            if len(self._left) == len(self._members):
                self._group.forget(self._key)

    def _check_agreed(self) -> None:
        if self._disagreement:
            raise CommError(self._disagreement, hint="every rank of a group must make the same calls in the same order")

    def _timed_out(self, rank: int) -> CommTimeout:
        group = self._group
        missing = [group.ranks[member] for member in self._members if member not in self.brought]
        last = {one: group.state.traces[one][-1:] for one in missing}
        where = "; ".join(
            f"rank {one} last called {calls[0].collective}" if calls else f"rank {one} has called nothing"
            for one, calls in last.items()
        )
        return CommTimeout(
            f"{self.collective} on rank {group.ranks[rank]} timed out after {group.state.timeout_s:g} s: "
            f"ranks {missing} did not arrive ({where})",
            missing_ranks=missing,
            hint="find out what the missing ranks do instead; every rank must make the same calls in the same order",
        )
