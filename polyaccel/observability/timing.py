"""The host's time by phase: `PhaseTimer`, a stopwatch with a lap for every phase of a step."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Literal, get_args

from polyaccel.observability.stats import DevicePhaseTimer

Phase = Literal["data", "forward", "backward", "reduce", "update", "publish", "other"]
"""`data`: waiting for the next micro-batch. `reduce`: starting and awaiting gradient reductions. `publish`: making the
updated parameters visible to all ranks. `other`: the rest of the step, for example a script's own work between
calls."""
PHASES: tuple[Phase, ...] = get_args(Phase)
Charge = Phase | Literal["outside"]
OUTSIDE: Literal["outside"] = "outside"
"""In place of a phase: time outside training steps, for example evaluation or saving a checkpoint."""


class PhaseTimer:
    """Divides the seconds of a step among its phases: `with timer("forward"): ...`.

    Every moment since the last `take` belongs to one phase or to none (`OUTSIDE`), so the phases add up to the step.
    Phases nest, and a moment counts for the innermost only; all that is nested in `OUTSIDE` is outside too. It is the
    host's time: the device is not synchronised, and work that is still queued counts where the host waits for it.
    `laps` has the device's own. One thread at a time (autograd's threads run while the caller's waits for them).
    """

    def __init__(self, laps: DevicePhaseTimer | None = None) -> None:
        self._device = laps
        self.on_lap: Callable[[str, bool], object] | None = None
        """Called where a phase begins (its name, True) and where the last one that began ends (its name, False)."""
        self.waited: Callable[[], float] | None = None
        """Returns how long this process has waited for other ranks in all; `take_waited` divides that among phases."""
        self._waited_before = 0.0
        self._waited_s: dict[str, float] = {}
        self._laps: dict[Charge, _Lap] = {phase: _Lap(self, phase) for phase in (*PHASES, OUTSIDE)}
        self._seconds: dict[Charge, float] = dict.fromkeys((*PHASES, OUTSIDE), 0.0)
        self._open: list[Charge] = ["other"]
        self._since = perf_counter()

    def __call__(self, phase: Charge) -> _Lap:
        """The context manager that charges a `with` block to `phase`; always the same object."""
        return self._laps[phase]

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call, in which phases still open are charged until now."""
        self._charge()
        taken: dict[str, float] = {phase: self._seconds[phase] for phase in PHASES}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken

    def take_waited(self) -> dict[str, float]:
        """Return seconds by phase spent waiting for ranks since the last call. Follows `take`."""
        taken, self._waited_s = self._waited_s, {}
        return taken

    def take_device(self) -> dict[str, float]:
        """Return device seconds by phase of the last ended step, with `outside`. Follows `take`."""
        return {} if self._device is None else self._device.take()

    def _charge(self) -> None:
        if self._device is not None:
            self._device.charge(self._open[-1])
        if self.waited is not None:
            waited_s, phase = self.waited(), self._open[-1]
            self._waited_s[phase] = self._waited_s.get(phase, 0.0) + max(0.0, waited_s - self._waited_before)
            self._waited_before = waited_s
        now = perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def _enter(self, phase: Charge) -> None:
        self._charge()
        self._open.append(OUTSIDE if self._open[-1] == OUTSIDE else phase)
        if self.on_lap is not None:
            self.on_lap(phase, True)

    def _leave(self) -> None:
        self._charge()
        phase = self._open.pop()
        if self.on_lap is not None:
            self.on_lap(phase, False)


class _Lap:
    """The context manager of a phase. Stateless, so one object serves all its uses, nested ones too."""

    __slots__ = ("_phase", "_timer")

    def __init__(self, timer: PhaseTimer, phase: Charge) -> None:
        self._timer = timer
        self._phase = phase

    def __enter__(self) -> None:
        self._timer._enter(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer._leave()
