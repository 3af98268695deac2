"""The flight recorder: what this rank's collectives were, how much they sent, and who is missing when one hangs.

`RecordingCommunicator` wraps any communicator and changes nothing but errors. Each call on a group has a sequence
number there; ranks that call the same collectives in the same order have the same numbers, so after a timeout the
number of each rank's last call, which a watchdog keeps on the communicator's board, tells who stayed behind and where.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from polyaccel.buffer import Buffer
from polyaccel.comm.agreement import check_agreement
from polyaccel.comm.arguments import Call
from polyaccel.comm.base import NO_INFO, Board, CallInfo, Communicator, Work
from polyaccel.comm.log import CommLog, Timing
from polyaccel.comm.watchdog import Watchdog, read_notes, where_ranks_are
from polyaccel.errors import CommError, CommTimeout
from polyaccel.types import DType, ReduceOp

_RING_LENGTH = 1024


@dataclass(slots=True)
class Entry:
    """One call: its number on the group of these (global) ranks, when it began, and when it ended or was waited for."""

    group: tuple[int, ...]
    seq: int
    call: Call
    started_s: float = field(default_factory=time)
    ended_s: float | None = None
    timing: Timing | None = None
    """The communication log's, if it records this call."""

    @property
    def done(self) -> bool:
        return self.ended_s is not None

    def __str__(self) -> str:
        return f"#{self.seq} {self.call}"


class Recorder:
    """The last calls of this process over all its groups, and the traffic of all of them.

    `sent_numel[op]` counts elements that this rank sends under the algorithm that sends least: of a whole of M elements
    over N ranks, 2 M (N-1)/N for an all-reduce, M (N-1)/N for a reduce-scatter, an all-gather and an all-to-all, M for
    a message and for the root of a broadcast. `calls[op]` counts calls.
    """

    def __init__(self, length: int = _RING_LENGTH) -> None:
        self.entries: deque[Entry] = deque(maxlen=length)
        self.sent_numel: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.last: dict[tuple[int, ...], Entry] = {}
        self.on_failure: Callable[[str], object] | None = None
        """Called when a call has failed, with a sentence that says so, before its error is raised."""

    def start(self, group: tuple[int, ...], seq: int, call: Call, sent_numel: float) -> Entry:
        entry = Entry(group, seq, call)
        self.entries.append(entry)
        self.last[group] = entry
        self.calls[call.op] += 1
        self.sent_numel[call.op] += sent_numel
        return entry

    def reset_traffic(self) -> None:
        """Count calls and elements from 0 again; the entries stay."""
        self.sent_numel.clear()
        self.calls.clear()


class RecordedWork(Work):
    """A recorded collective under way."""

    def __init__(self, work: Work, entry: Entry, owner: RecordingCommunicator) -> None:
        self._work = work
        self._entry = entry
        self._owner = owner

    def wait(self) -> None:
        try:
            self._work.wait()
        except CommError as error:
            raise self._owner.explain(self._entry, error) from error
        self._owner.end(self._entry)

    def is_done(self) -> bool:
        return self._work.is_done()


class RecordingCommunicator(Communicator):
    """`inner` with a record of every call.

    With `debug`, ranks compare each collective before they run it, which costs one small object gather a call; calls
    that differ are a CommError on every rank. `watch_s` is how often the watchdog looks for news (None: no watchdog).
    """

    def __init__(
        self,
        inner: Communicator,
        recorder: Recorder | None = None,
        *,
        debug: bool = False,
        watch_s: float | None = 1.0,
    ) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.ranks = inner.ranks
        self.backend = inner.backend
        self.accelerator = inner.accelerator
        self.timeout_s = inner.timeout_s
        self.deterministic = inner.deterministic
        self.summed_first = inner.summed_first
        self.debug = debug
        self.recorder = recorder or Recorder()
        self.log: CommLog | None = None
        """Where latencies go; see `comm.summary.start_log`."""
        self.at_close: list[Callable[[], object]] = []
        """Called in this order when the communicator is closed."""
        self._calls = 0
        self._board = inner.board() if self.world_size > 1 else None
        self._watchdog: Watchdog | None = None
        if self._board is not None and watch_s is not None:
            self._watchdog = Watchdog(self._board, self.ranks[self.rank], self.recorder.last, watch_s)

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        call = Call("all_reduce", buffer.numel, buffer.dtype, op.value, info)
        entry = self._enter(call, 2 * self._share(buffer.numel))
        try:
            return self._left(entry, self.inner.all_reduce(buffer, op, async_op=async_op, info=info), async_op)
        except CommError as error:
            raise self.explain(entry, error) from error

    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        info: CallInfo = NO_INFO,
    ) -> Work:
        call = Call("reduce_scatter", source.numel, source.dtype, op.value, info)
        entry = self._enter(call, self._share(source.numel))
        try:
            return self._left(entry, self.inner.reduce_scatter(out, source, op, async_op=async_op, info=info), async_op)
        except CommError as error:
            raise self.explain(entry, error) from error

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        entry = self._enter(Call("all_gather", out.numel, out.dtype, "", info), self._share(out.numel))
        try:
            return self._left(entry, self.inner.all_gather(out, source, async_op=async_op, info=info), async_op)
        except CommError as error:
            raise self.explain(entry, error) from error

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        call = Call("broadcast", buffer.numel, buffer.dtype, f"from {root}", info)
        entry = self._enter(call, buffer.numel if self.rank == root and self.world_size > 1 else 0)
        try:
            return self._left(entry, self.inner.broadcast(buffer, root, async_op=async_op, info=info), async_op)
        except CommError as error:
            raise self.explain(entry, error) from error

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        entry = self._enter(Call("all_to_all", out.numel, out.dtype, "", info), self._share(out.numel))
        try:
            return self._left(entry, self.inner.all_to_all(out, source, async_op=async_op, info=info), async_op)
        except CommError as error:
            raise self.explain(entry, error) from error

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        entry = self._message(Call("send", buffer.numel, buffer.dtype, f"to {to}", info), buffer.numel)
        try:
            return self._left(entry, self.inner.send(buffer, to, async_op=async_op, info=info), async_op)
        except CommError as error:
            raise self.explain(entry, error) from error

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        entry = self._message(Call("recv", buffer.numel, buffer.dtype, f"from {source}", info), 0)
        try:
            return self._left(entry, self.inner.recv(buffer, source, async_op=async_op, info=info), async_op)
        except CommError as error:
            raise self.explain(entry, error) from error

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        entry = self._enter(Call("barrier", info=info), 0)
        try:
            self.inner.barrier(info=info)
        except CommError as error:
            raise self.explain(entry, error) from error
        self.end(entry)

    def all_gather_object(self, value: Any) -> list[Any]:
        entry = self._enter(Call("all_gather_object"), 0)
        try:
            values = self.inner.all_gather_object(value)
        except CommError as error:
            raise self.explain(entry, error) from error
        self.end(entry)
        return values

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        entry = self._enter(Call("split", detail=str(list(ranks))), 0)
        try:
            part = self.inner.split(ranks)
        except CommError as error:
            raise self.explain(entry, error) from error
        self.end(entry)
        if part is None:
            return None
        # One watchdog a process: it reports the last call on every group.
        group = RecordingCommunicator(part, self.recorder, debug=self.debug, watch_s=None)
        group.log = self.log
        return group

    def close(self) -> None:
        while self.at_close:
            self.at_close.pop(0)()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        self.inner.close()

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        return self.inner.allocate(numel, dtype)

    def allocate_shared(self, numel: int, dtype: DType) -> Buffer | None:
        return self.inner.allocate_shared(numel, dtype)

    def board(self) -> Board | None:
        return self._board

    def end(self, entry: Entry) -> None:
        """`entry`'s call has ended well, or has been waited for."""
        if entry.ended_s is not None:
            return
        if entry.timing is not None and self.log is not None:
            self.log.end(entry.timing)
        entry.ended_s = time()

    def explain(self, entry: Entry, error: CommError) -> CommError:
        """`error` with what the board knows of the ranks that did not take part in `entry`'s call."""
        if self.recorder.on_failure is not None:
            self.recorder.on_failure(f"a collective {'timed out' if isinstance(error, CommTimeout) else 'failed'}")
        known = _missing_of(error)
        notes = read_notes(self._board, max(self.ranks) + 1) if self._board is not None else {}
        places = where_ranks_are(
            entry.group, self.ranks[self.rank], entry.seq, str(entry.call), notes, known, now_s=time()
        )
        if not places and not known:
            return error
        # Ours is the number that notes and dumps have: of what is one call here, `inner` may make several.
        said = re.sub(rf"^#\d+ (?={re.escape(str(entry.call))})", f"#{entry.seq} ", error.message)
        said = said if str(entry.call) in said else f"{entry}: {said}"
        message = "; ".join([said, *places.values()])
        if isinstance(error, CommTimeout):
            missing = tuple(sorted({*known, *places}))
            return CommTimeout(message, missing_ranks=missing, cure=error.cure, value=missing)
        return CommError(message, cure=error.cure, value=error.value)

    def _enter(self, call: Call, sent_numel: float) -> Entry:
        seq = self._calls
        self._calls += 1
        self.sent_numel += round(sent_numel)
        entry = self.recorder.start(self.ranks, seq, call, sent_numel)
        if self.debug:
            try:
                check_agreement(self.inner, seq, call)
            except CommTimeout as error:
                raise self.explain(entry, error) from error
        return self._timed(entry)

    def _message(self, call: Call, sent_numel: int) -> Entry:
        """Messages have no number of their own: the ranks that do not take part would fall behind."""
        self.sent_numel += sent_numel
        return self._timed(self.recorder.start(self.ranks, self._calls - 1, call, sent_numel))

    def _timed(self, entry: Entry) -> Entry:
        if self.log is not None:
            entry.timing = self.log.begin(entry.call, self.world_size)
        return entry

    def _left(self, entry: Entry, work: Work, async_op: bool) -> Work:
        if not async_op:
            self.end(entry)
            return work
        return RecordedWork(work, entry, self)

    def _share(self, numel: int) -> float:
        """What leaves a rank when everybody's parts of `numel` elements go round: exact where it divides."""
        part, rest = divmod(numel, self.world_size)
        return numel * (self.world_size - 1) / self.world_size if rest else part * (self.world_size - 1)


def _missing_of(error: CommError) -> tuple[int, ...]:
    """The global ranks that the inner communicator found missing."""
    if isinstance(error, CommTimeout):
        return error.missing_ranks
    value = error.value
    return value if isinstance(value, tuple) and all(isinstance(rank, int) for rank in value) else ()
