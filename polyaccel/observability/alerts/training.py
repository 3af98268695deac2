"""Alarms of the training itself: its loss, and the norm of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import fsum, isfinite, nan

from polyaccel.observability.alerts.robust import Window
from polyaccel.observability.alerts.settings import AlarmSettings
from polyaccel.observability.metrics import Alarm, StepMetrics

_LEAST_LOSS, _LEAST_NORM = 0.01, 0.1
"""Shares of the median that are noise in any case."""


class TrainingAlarms:
    """Looks at the loss, a mean over the ranks, and at the norm of all gradients, step by step.

    Neither is compared while the learning rate warms up, from the first step of this start on; steps that were skipped
    for an overflow do not count.
    """

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._loss = Window(settings.window, _LEAST_LOSS)
        self._norm = Window(settings.window, _LEAST_NORM)
        self._is_warming_up = True
        self._lr_before: float | None = None

    def look(self, metrics: StepMetrics, losses: Mapping[int, float]) -> Iterator[Alarm]:
        """The alarms of one step; `losses` are the ranks' own."""
        warms_up = self._follow(metrics.lr)
        if metrics.skipped:
            return
        yield from self._look_at_loss(metrics.step, losses, is_compared=not warms_up)
        if self._settings.grad_norm and metrics.grad_norm is not None and metrics.grad_norm >= 0:
            yield from self._look_at_norm(metrics.step, metrics.grad_norm, is_compared=not warms_up)

    def _follow(self, lr: tuple[float, ...]) -> bool:
        """Whether the learning rate has risen in every step so far."""
        now, before = lr[0] if lr else 0.0, self._lr_before
        self._is_warming_up &= before is None or now > before
        self._lr_before = now
        return self._is_warming_up

    def _look_at_loss(self, step: int, losses: Mapping[int, float], *, is_compared: bool) -> Iterator[Alarm]:
        if not self._settings.loss or not losses:
            return
        bad = tuple(rank for rank, loss in losses.items() if not isfinite(loss))
        if bad:
            what = f"the loss of step {step:,} is {losses[bad[0]]} on {_ranks(bad)}"
            hint = "look at the batch of that step, lower the learning rate, or set gradient_clipping"
            yield Alarm(kind="loss", step=step, value=nan, ranks=bad, sentence=f"{what}: {hint}")
            return
        loss = fsum(losses.values()) / len(losses)
        rise = self._loss.rise(loss) if is_compared else 0.0
        if rise > self._settings.loss:
            usual, worst = self._loss.median, max(losses, key=lambda rank: losses[rank])
            where = f", most on rank {worst} ({losses[worst]:.4g})" if len(losses) > 1 else ""
            what = f"the loss of step {step:,} is {loss:.4g}{where}, {rise:.0f} deviations above the usual {usual:.4g}"
            hint = "look at the batch of that step, lower the learning rate, or set gradient_clipping"
            yield Alarm(kind="loss", step=step, value=rise, sentence=f"{what}: {hint}")
        if is_compared:
            self._loss.add(loss)

    def _look_at_norm(self, step: int, norm: float, *, is_compared: bool) -> Iterator[Alarm]:
        hint = "set gradient_clipping, lower the learning rate, or look at the batch of that step"
        if not isfinite(norm):
            what = f"the norm of the gradients of step {step:,} is {norm}, and they were applied"
            hint += "; continue from the checkpoint before it"
            yield Alarm(kind="grad_norm", step=step, value=nan, sentence=f"{what}: {hint}")
            return
        if not norm:
            return  # nothing was trained in that step
        rise = self._norm.rise(norm) if is_compared else 0.0
        if rise > self._settings.grad_norm:
            usual = self._norm.median
            what = f"the norm of the gradients of step {step:,} is {norm:.4g}, {norm / usual:.0f} times the usual"
            yield Alarm(kind="grad_norm", step=step, value=rise, sentence=f"{what} {usual:.4g}: {hint}")
        if is_compared:
            self._norm.add(norm)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
