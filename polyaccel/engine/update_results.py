"""What updates found, some of it a few steps later: the host reads norms that decide nothing when they have arrived."""

from __future__ import annotations

from collections import deque
from logging import INFO, WARNING, getLogger

from polyaccel.engine.loss_scale import LossScaler
from polyaccel.zero.update.optimizer_step import StepResult

log = getLogger(__name__)

MOST_UNREAD = 8
"""The most updates whose norms are not read. With one more the host waits for the oldest."""


class UpdateResults:
    """Logs which gradients were not finite as soon as the host knows it, on the rank that `speaks`."""

    def __init__(self, loss_scaler: LossScaler, *, speaks: bool) -> None:
        self._loss_scaler = loss_scaler
        self._speaks = speaks
        self._unread: deque[tuple[int, StepResult]] = deque()
        self.has_applied_not_finite = False
        """Whether an update that is known was computed from gradients that are not finite."""

    def add(self, step: int, result: StepResult) -> None:
        """Take the result of an update; the loss scale follows."""
        self._loss_scaler.update(not result.applied, None if result.applied else result.first_nonfinite_param)
        self._unread.append((step, result))
        while self._unread and (self._unread[0][1].has_arrived or len(self._unread) > MOST_UNREAD):
            self._read_oldest()

    def settle(self) -> None:
        """Read all norms; waits for the device."""
        while self._unread:
            self._read_oldest()

    def forget(self) -> None:
        """States were loaded: what was found before does not concern them."""
        self.settle()
        self.has_applied_not_finite = False

    def _read_oldest(self) -> None:
        step, result = self._unread.popleft()
        if result.first_nonfinite_param is not None and self._speaks:
            self._tell(step, result)

    def _tell(self, step: int, result: StepResult) -> None:
        """Say which gradient was not finite: once in a while under a loss scale that is still being found, that is
        usual."""
        name = result.first_nonfinite_param
        if not result.applied:
            is_news = self._loss_scaler.skips_in_a_row == 1 and not self._loss_scaler.dynamic
            log.log(WARNING if is_news else INFO, "step %d skipped: the gradient of %s is not finite", step, name)
        elif not self.has_applied_not_finite:
            self.has_applied_not_finite = True
            log.warning(
                "step %d applied gradients that are not finite, the first of %s: weights are NaN from here on, and no "
                "checkpoint of them becomes the one to resume from (said once)",
                step, name,
            )  # fmt: skip
