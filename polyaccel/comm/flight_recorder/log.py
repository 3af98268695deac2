"""The communication log: how long collectives take, by operation and size.

DeepSpeed's `comms_logger`, with two differences: the device is not synchronised after every call (points in its stream
are recorded and read later), and `enabled: false` means off. `summary` computes bandwidths from the latencies.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyaccel.accelerators.base import Event, Stream
from polyaccel.comm.collective import Collective

_UNREAD_AT_MOST = 256  # points in streams that are kept before their times are read
_ROOM = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class CallKey:
    """Calls with one key are counted together: the operation, the bytes of the whole buffer, the ranks, the caller."""

    op: str
    nbytes: int
    world_size: int
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """A call under way."""

    key: CallKey
    start: Event
    stream: Stream


@dataclass(slots=True)
class CommLog:
    """Latencies of the calls of one rank.

    `ops` empty: all of them. `said` gets each call's key and latency in milliseconds as it ends, which waits for the
    device. `callers` counts calls apart by the function outside this package that made them.

    An asynchronous call lasts until it was waited for. Where the device has streams, times are between points of the
    current stream.
    """

    current_stream: Callable[[], Stream]
    ops: frozenset[str] = frozenset()
    said: Callable[[CallKey, float], None] | None = None
    callers: bool = False
    _latencies_ms: dict[CallKey, array[float]] = field(default_factory=dict)
    _unread: deque[tuple[Timing, Event]] = field(default_factory=deque)

    def begin(self, collective: Collective, world_size: int) -> Timing | None:
        """Start the clock of a call; None if it is not to be recorded."""
        operation = collective.operation.value
        if self.ops and operation not in self.ops:
            return None
        nbytes = collective.numel * collective.dtype.itemsize if collective.dtype else 0
        stream = self.current_stream()
        return Timing(
            CallKey(operation, nbytes, world_size, _caller() if self.callers else ""), stream.record(), stream
        )

    def end(self, timing: Timing) -> None:
        """The call has ended, or has been waited for."""
        self._unread.append((timing, timing.stream.record()))
        if self.said is not None:
            self._read()
            self.said(timing.key, self._latencies_ms[timing.key][-1])
        elif len(self._unread) >= _UNREAD_AT_MOST:
            self._read()

    def latencies_ms(self) -> Mapping[CallKey, Sequence[float]]:
        """Every recorded latency by key, in the order of the calls. Waits for the device."""
        self._read()
        return self._latencies_ms

    def reset(self) -> None:
        """Forget everything."""
        self._unread.clear()
        self._latencies_ms.clear()

    def _read(self) -> None:
        while self._unread:
            timing, end = self._unread.popleft()
            end.synchronize()
            self._latencies_ms.setdefault(timing.key, array("d")).append(timing.start.elapsed_ms(end))


def _caller() -> str:
    """The innermost function outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ROOM):
        frame = frame.f_back
    return frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
