"""Where the host's time goes: `PhaseTimer`, a stopwatch with a lap for every phase of a step."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Literal, get_args

Phase = Literal["data", "forward", "backward", "reduce", "update", "publish"]
"""`data`: waiting for the next micro-batch. `reduce`: starting and awaiting gradient reductions. `publish`: making the
updated parameters visible to all ranks."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseTimer:
    """Adds up seconds by phase: `with timer("forward"): ...`.

    Phases nest, and time counts for the innermost only, so a reduction started inside backward is not counted twice and
    the phases never add up to more than the step. It is the host's time: the device is not synchronised, and work that
    is still queued counts where the host waits for it. One thread at a time (autograd's threads run while the caller's
    waits for them).
    """

    def __init__(self) -> None:
        self._laps: dict[Phase, _Lap] = {phase: _Lap(self, phase) for phase in PHASES}
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[Phase] = []
        self._since = 0.0

    def __call__(self, phase: Phase) -> _Lap:
        """The context manager that charges a `with` block to `phase`; always the same object."""
        return self._laps[phase]

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call, in which phases still open are charged until now."""
        self._charge()
        taken: dict[str, float] = dict(self._seconds.items())
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return taken

    def _charge(self) -> None:
        now = perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def _enter(self, phase: Phase) -> None:
        self._charge()
        self._open.append(phase)

    def _leave(self) -> None:
        self._charge()
        self._open.pop()


class _Lap:
    """What `with` needs of a phase. Stateless, so one object serves all its uses, nested ones too."""

    __slots__ = ("_phase", "_timer")

    def __init__(self, timer: PhaseTimer, phase: Phase) -> None:
        self._timer = timer
        self._phase = phase

    def __enter__(self) -> None:
        self._timer._enter(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer._leave()
