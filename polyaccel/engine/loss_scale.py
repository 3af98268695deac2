"""Loss scaling for fp16: the loss is multiplied so that small gradients do not vanish, and divided out of the update.

The dynamic scale is that of Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), with DeepSpeed's
hysteresis. All ranks agree on whether a step overflowed before they update the scale, so that their scales stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from polyaccel.errors import CheckpointError, ConfigError, LossScaleError, Problem

SCALE_FACTOR = 2.0
"""The scale grows and shrinks by this factor. A power of two, so that scaling rounds nothing."""
MOST_SKIPS = 17
"""Steps in a row that may be skipped where the scale cannot shrink: as many as a dynamic one of fp16 skips from its
default to its minimum."""


@dataclass(frozen=True, slots=True)
class LossScalePolicy:
    """The rule by which a loss scale moves; `dynamic` False keeps `initial_scale` for ever.

    `window` good steps have to follow an overflow before the next good step doubles the scale; afterwards every
    `window` good steps double it again. `hysteresis` - 1 overflows are tolerated before one halves the scale; the
    tolerated ones are forgotten when the scale grows, or with every good step if `consecutive_hysteresis`.
    """

    initial_scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            Problem(key, value, expected)
            for key, value, good, expected in (
                ("fp16.loss_scale", self.initial_scale, _is_positive(self.initial_scale), "a finite number above 0"),
                ("fp16.loss_scale_window", self.window, self.window >= 1, "expected at least 1"),
                ("fp16.hysteresis", self.hysteresis, self.hysteresis >= 1, "expected at least 1"),
                ("fp16.min_loss_scale", self.min_scale, _is_positive(self.min_scale), "a finite number above 0"),
            )
            if not good
        ]
        if not problems and self.dynamic and self.initial_scale < self.min_scale:
            expected = f"is above the initial scale {self.initial_scale:g}"
            hint = "raise fp16.initial_scale_power, or lower this"
            problems.append(Problem("fp16.min_loss_scale", self.min_scale, expected, hint))
        if problems:
            raise ConfigError(problems)


class LossScaler:
    """The loss scale as it stands. `LossScaler()` is the scale 1 of fp32 and bf16, which never moves."""

    def __init__(self, policy: LossScalePolicy | None = None) -> None:
        self.policy = policy or LossScalePolicy()
        self._scale = self.policy.initial_scale
        self._good_steps = 0
        self._tolerance = self.policy.hysteresis
        self.skips_in_a_row = 0
        """Steps that were skipped since the last one that was not."""

    @classmethod
    def from_config(
        cls,
        *,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> LossScaler:
        """Read the `fp16` section; a `loss_scale` of 0 means dynamic, from 2^initial_scale_power."""
        dynamic = loss_scale == 0
        if dynamic and not -1022 <= initial_scale_power <= 1023:  # where 2.0**power is an ordinary float
            raise ConfigError([Problem("fp16.initial_scale_power", initial_scale_power, "expected -1022 to 1023")])
        return cls(
            LossScalePolicy(
                initial_scale=2.0**initial_scale_power if dynamic else float(loss_scale),
                dynamic=dynamic,
                window=loss_scale_window,
                hysteresis=hysteresis,
                consecutive_hysteresis=consecutive_hysteresis,
                min_scale=float(min_loss_scale),
            )
        )

    @property
    def loss_scale(self) -> float:
        return self._scale

    @property
    def dynamic(self) -> bool:
        return self.policy.dynamic

    @property
    def is_active(self) -> bool:
        """Whether losses are multiplied with a scale."""
        return self.dynamic or self._scale != 1.0

    def update(self, overflow: bool, culprit: str | None = None) -> None:
        """Halve the loss scale after an overflow; double it after a window of steps without one.

        Raises LossScaleError when it would have to go below the minimum, or cannot move and more than `MOST_SKIPS`
        steps were skipped one after the other; `culprit` is the parameter that the message then names, the first whose
        gradient is not finite.
        """
        self.skips_in_a_row = self.skips_in_a_row + 1 if overflow else 0
        if not self.dynamic:
            if self.skips_in_a_row > MOST_SKIPS:
                raise LossScaleError(
                    f"{self.skips_in_a_row} steps in a row had gradients that are not finite, {_first(culprit)}: "
                    "nothing is trained any more",
                    hint="load the last good checkpoint and look for the cause: learning rate, data, or the layer of "
                    "that parameter",
                    value=culprit,
                )
            return
        if overflow:
            self._good_steps = 0
            self._tolerate_or_halve(culprit)
            return
        self._good_steps += 1
        if self.policy.consecutive_hysteresis:
            self._tolerance = self.policy.hysteresis
        # DeepSpeed does not count the first good step after an overflow, nor the very first of a run.
        counted = self._good_steps - 1
        if counted > 0 and counted % self.policy.window == 0:
            self._tolerance = self.policy.hysteresis
            self._scale *= SCALE_FACTOR

    def _tolerate_or_halve(self, culprit: str | None) -> None:
        if self._tolerance > 1:
            self._tolerance -= 1
        elif self._scale > self.policy.min_scale:
            self._scale = max(self._scale / SCALE_FACTOR, self.policy.min_scale)
        else:
            raise LossScaleError(
                f"fp16 gradients are not finite although the loss scale {self._scale:g} is at its minimum, "
                f"{_first(culprit)}",
                hint="train in bf16 ({'bf16': {'enabled': true}}), or look for the cause: learning rate, data, "
                "or values above 65504 in that layer; lower fp16.min_loss_scale only if gradients are truly that large",
                value=culprit,
            )

    def state_dict(self) -> dict[str, float | int]:
        return {"loss_scale": self._scale, "good_steps": self._good_steps, "tolerance": self._tolerance}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`'s scale; a static scale stays that of the config."""
        scale, good, tolerance = (state_dict.get(key) for key in ("loss_scale", "good_steps", "tolerance"))
        if not (_is_positive(scale) and _is_count(good) and _is_count(tolerance)):
            raise CheckpointError(
                f"no loss scale in the saved state {dict(state_dict)!r}",
                hint="load what LossScaler.state_dict() gave",
                value=dict(state_dict),
            )
        if self.dynamic:
            self._scale = max(float(state_dict["loss_scale"]), self.policy.min_scale)
            self._good_steps = int(state_dict["good_steps"])
            # The config may have changed in between: never tolerate more than it does now.
            self._tolerance = min(max(1, int(state_dict["tolerance"])), self.policy.hysteresis)


def _first(culprit: str | None) -> str:
    return f"the first in parameter {culprit!r}" if culprit else "in an unknown parameter"


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value > 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
