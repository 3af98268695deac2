"""The flight recorder: what this rank's collectives were, how much they sent, and who is missing when one hangs.

`RecordingCommunicator` wraps any communicator and changes nothing but errors. Each call on a group has a sequence
number there; ranks that call the same collectives in the same order have the same numbers, so after a timeout the
number of each rank's last call, which a watchdog keeps on the communicator's board, shows who stayed behind and where.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import time

from polyaccel.comm.base import Communicator, StatusStore
from polyaccel.comm.collective import MESSAGES, Collective, Operation
from polyaccel.comm.flight_recorder.log import CommLog, Timing
from polyaccel.comm.flight_recorder.watchdog import (
    Watchdog,
    describe_missing_ranks,
    have_ended,
    read_notes,
    shown,
    wait_for_ends,
)
from polyaccel.comm.shared_memory import SharedMemory
from polyaccel.comm.work import Work
from polyaccel.comm.wrappers.wrapped import WrappedCommunicator
from polyaccel.core.types import DType
from polyaccel.errors import CommError, CommTimeout

_log = logging.getLogger(__name__)

_RING_LENGTH = 1024


class Entry:
    """A call on the group of these (global) ranks, when it began, and when it ended or was waited for (None: not yet),
    in seconds of the wall clock. `timing` is the communication log's, if that records it."""

    __slots__ = ("collective", "ended_s", "group", "started_s", "timing", "waited_s")

    def __init__(self, group: tuple[int, ...], collective: Collective) -> None:
        self.group = group
        self.collective = collective
        self.started_s = time()
        self.ended_s: float | None = None
        self.waited_s: float | None = None
        """When a caller began to wait for a call that was under way."""
        self.timing: Timing | None = None

    @property
    def seq(self) -> int:
        """The call's number on its group."""
        number = self.collective.number
        return -1 if number is None else number

    @property
    def done(self) -> bool:
        return self.ended_s is not None

    def __str__(self) -> str:
        return str(self.collective)


class FlightRecorder:
    """The last calls of this process over all its groups, and the traffic of all of them.

    `sent_numel[operation]` counts the elements that this rank sent (`Collective.sent_numel`), `sent_nbytes[operation]`
    their bytes, `calls[operation]` the calls, and `waited_s[operation]` the seconds in which the host did nothing else.
    """

    def __init__(self, length: int = _RING_LENGTH) -> None:
        self.entries: deque[Entry] = deque(maxlen=length)
        self.sent_numel: defaultdict[str, float] = defaultdict(float)
        self.sent_nbytes: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.last: dict[tuple[int, ...], Entry] = {}
        self.kept: list[Entry] | None = None
        """Where all calls go, the last and those before; None: they are not wanted."""
        self.on_failure: Callable[[str], str] | None = None
        """Called when a call has failed, with a sentence about it, before its error is raised."""

    def start(self, group: tuple[int, ...], collective: Collective, sent_numel: float) -> Entry:
        entry = Entry(group, collective)
        operation = collective.operation
        self.entries.append(entry)
        if self.kept is not None:
            self.kept.append(entry)
        self.last[group] = entry
        self.calls[operation] += 1
        self.sent_numel[operation] += sent_numel
        dtype = collective.parts[0].dtype if collective.parts else collective.dtype
        if dtype is not None:
            self.sent_nbytes[operation] += sent_numel * dtype.itemsize
        return entry

    def reset_traffic(self) -> None:
        """Count calls and elements from 0 again; the entries stay."""
        for counts in (self.sent_numel, self.sent_nbytes, self.calls, self.waited_s):
            counts.clear()


class RecordedWork(Work):
    """A recorded collective under way."""

    def __init__(self, work: Work, entry: Entry, owner: RecordingCommunicator) -> None:
        self._work = work
        self._entry = entry
        self._owner = owner

    def wait(self) -> None:
        if self._entry.waited_s is None:
            self._entry.waited_s = time()
        try:
            self._work.wait()
        except CommError as error:
            raise self._owner.explain(self._entry, error) from error
        self._owner.end(self._entry)

    def is_done(self) -> bool:
        return self._work.is_done()


class RecordingCommunicator(WrappedCommunicator):
    """`inner` with a record of every call.

    With `debug`, ranks compare each collective before they run it, which costs one small object gather a call; calls
    that differ are a CommError on every rank. `watch_s` is how often the watchdog looks for news (None: no watchdog).
    """

    def __init__(
        self,
        inner: Communicator,
        recorder: FlightRecorder | None = None,
        *,
        debug: bool = False,
        watch_s: float | None = 1.0,
    ) -> None:
        super().__init__(inner)
        self.debug = debug
        self.recorder = recorder or FlightRecorder()
        self.log: CommLog | None = None
        """Where latencies go; see `summary.start_log`."""
        self.at_close: list[Callable[[], object]] = []
        """Called in this order when the communicator is closed."""
        self._board = inner.board() if self.world_size > 1 else None
        self._watchdog: Watchdog | None = None
        if self._board is not None and watch_s is not None:
            self._watchdog = Watchdog(self._board, self.ranks[self.rank], self.recorder.last, watch_s)

    def call(self, collective: Collective) -> Work:
        if collective.number is None:
            collective.number = self.last_number() if collective.operation in MESSAGES else self.next_number()
        return self.start(collective)

    def start(self, collective: Collective) -> Work:
        entry = self._enter(collective)
        try:
            work = self.inner.call(collective)
        except CommError as error:
            raise self.explain(entry, error) from error
        if collective.async_op:
            return RecordedWork(work, entry, self)
        self.end(entry)
        return work

    def next_number(self) -> int | None:
        return Communicator.next_number(self)

    def last_number(self) -> int | None:
        return Communicator.last_number(self)

    def inside(self, number: int | None) -> AbstractContextManager[None]:
        return Communicator.inside(self, number)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        with self._recorded(Collective(Operation.OBJECTS)):
            return self.inner.all_gather_bytes(data)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        with self._recorded(Collective(Operation.SPLIT, members=tuple(ranks))):
            part = self.inner.split(ranks)
        return None if part is None else self._record(part)

    def new_host_group(self) -> Communicator | None:
        with self._recorded(Collective(Operation.SPLIT, members=tuple(range(self.world_size)))):
            group = self.inner.new_host_group()
        return None if group is None else self._record(group)

    def _record(self, part: Communicator) -> RecordingCommunicator:
        """Record the calls of another group of the same process too."""
        # One watchdog a process: it reports the last call on every group.
        group = RecordingCommunicator(part, self.recorder, debug=self.debug, watch_s=None)
        group.log = self.log
        group.host_topology = self.host_topology
        return group

    def allocate_shared(self, numel: int, dtype: DType) -> SharedMemory | None:
        with self._recorded(Collective(Operation.SHARED, numel=numel, dtype=dtype)):
            return self.inner.allocate_shared(numel, dtype)

    def close(self) -> None:
        while self.at_close:
            self.at_close.pop(0)()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        self.inner.close()

    def leave(self, why: str) -> None:
        """Notify the others that this rank takes part no more: its process ends, which can take a while."""
        if self._watchdog is not None:
            self._watchdog.stop(why)

    def board(self) -> StatusStore | None:
        return self._board

    def end(self, entry: Entry) -> None:
        """`entry`'s call has ended well, or has been waited for."""
        if entry.ended_s is not None:
            return
        if entry.timing is not None and self.log is not None:
            self.log.end(entry.timing)
        entry.ended_s = now_s = time()
        waited_s = now_s - (entry.started_s if entry.waited_s is None else entry.waited_s)
        self.recorder.waited_s[entry.collective.operation] += max(0.0, waited_s)
        entry.collective.let_go()

    def explain(self, entry: Entry, error: CommError) -> CommError:
        """`error` with what the board has about the ranks that did not take part in `entry`'s call."""
        record = self.recorder.on_failure
        where = record(f"a collective {'timed out' if isinstance(error, CommTimeout) else 'failed'}") if record else ""
        known, is_late = error.missing_ranks, isinstance(error, CommTimeout)
        notes = read_notes(self._board, max(self.ranks) + 1) if self._board is not None else {}
        if not is_late:
            wait_for_ends(notes, entry.group, known)
        descriptions = describe_missing_ranks(
            entry.group,
            self.ranks[self.rank],
            entry.seq,
            shown(entry.collective),
            notes,
            known,
            now_s=time(),
            started_s=entry.started_s,
            is_late=is_late,
        )
        if not descriptions and not known:
            if where:
                _log.warning(where)
            return error
        said = error.message if str(entry.collective) in error.message else f"{entry.collective}: {error.message}"
        message = "; ".join([said, *descriptions.values()])
        missing = tuple(sorted({*known, *(descriptions if is_late else have_ended(notes, entry.group))}))
        if where:  # at once: a launcher may end this rank before its traceback
            _log.warning("rank %d: %s; %s", self.ranks[self.rank], message, where)
        if is_late:
            return CommTimeout(message, missing_ranks=missing, hint=error.hint)
        return CommError(message, missing_ranks=missing, hint=error.hint, value=error.value)

    @contextmanager
    def _recorded(self, collective: Collective) -> Iterator[None]:
        """Record a call that the inner communicator makes of others, which have its number."""
        collective.number = number = self.next_number()
        entry = self._enter(collective)
        try:
            with self.inner.inside(number):
                yield
        except CommError as error:
            raise self.explain(entry, error) from error
        self.end(entry)

    def _enter(self, collective: Collective) -> Entry:
        sent_numel = collective.sent_numel(self.rank, self.world_size)
        self.sent_numel += round(sent_numel)
        entry = self.recorder.start(self.ranks, collective, sent_numel)
        if self.debug and collective.operation not in MESSAGES:
            try:
                check_same_call(self.inner, collective)
            except CommTimeout as error:
                raise self.explain(entry, error) from error
        if self.log is not None:
            entry.timing = self.log.begin(collective, self.world_size)
        return entry


def check_same_call(communicator: Communicator, collective: Collective) -> None:
    """Compare (number, operation, size, type, root, counts) over all ranks, in debug mode. Raises CommError."""
    mine = (collective.number, *collective.agreed_key())
    with communicator.inside(collective.number):
        calls = communicator.all_gather_object((mine, str(collective)))
    wanted, wanted_text = calls[0]
    others = [(rank, text) for rank, (theirs, text) in enumerate(calls) if theirs != wanted]
    if others:
        named = ", ".join(f"rank {communicator.ranks[rank]} called {text}" for rank, text in others)
        raise CommError(
            f"ranks disagree about a collective: rank {communicator.ranks[0]} called {wanted_text}, {named}",
            hint="every rank of a group must make the same calls in the same order, with the same sizes and types",
            value=tuple(communicator.ranks[rank] for rank, _ in others),
        )
