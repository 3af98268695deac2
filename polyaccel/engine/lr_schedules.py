"""The learning-rate schedules that a config can name: `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle` and
`LRRangeTest`, with the parameters and defaults of DeepSpeed, and those of `lr_phases`.

A schedule writes `lr` (and `OneCycle` the momentum) into the `param_groups` of an optimizer of any framework. Its
values are pure functions of the iteration (`lr_curves`), so its whole state is one number.

[Note: Learning rate of the first steps]
The engine calls `step()` after each optimizer step that was applied, and a schedule sets the groups when it is
constructed. So optimizer step 1 runs at iteration -1, step 2 at iteration 0, and so on, as in DeepSpeed. The warmups
have the same value at -1 and 0, hence the first *two* optimizer steps both run at the warmup's lowest rate: 0 by
default, with which the first two steps change nothing but the moments. `OneCycle` and `LRRangeTest` move at once.

Where this differs from DeepSpeed 0.19, on purpose: an unknown `warmup_type` is an error; `warmup_max_lr: null` means
each group's own rate, not the first group's; WarmupCosineLR starts at `warmup_min_ratio` and not at 0; OneCycle starts
at the *highest* momentum (DeepSpeed at the lowest, for one step), leaves the second beta alone (DeepSpeed sets it to
0.99), and cycles SGD's `momentum` as well.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from polyaccel.engine.lr_curves import (
    CycleShape,
    WarmupType,
    cosine_decay,
    linear_decay,
    range_test_factor,
    warmup_ramp,
)
from polyaccel.engine.lr_phases import PhasedLR, WarmupCosineRestartsLR, WarmupInverseSqrtLR, WarmupStableDecayLR
from polyaccel.engine.lr_schedule_base import HasParamGroups, Schedule, check_arguments
from polyaccel.engine.policies.schedules import schedule_arguments
from polyaccel.errors import ConfigError, Problem

_LOG = logging.getLogger(__name__)

PerGroup = float | Sequence[float]
"""One number for all optimizer groups, or one for each."""


class WarmupLR(Schedule):
    """Rise from `warmup_min_lr` to `warmup_max_lr` (None: each group's own rate) in `warmup_num_steps`, then stay.

    `warmup_num_steps` counts as at least 2. Raises ConfigError naming every parameter that is wrong.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = check_arguments(self, locals())
        self.min_lrs, self.max_lrs = _warmup_range(optimizer, given)
        self.warmup_num_steps, self.warmup_type = given["warmup_num_steps"], given["warmup_type"]
        super().__init__(optimizer, last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        height = warmup_ramp(iteration, num_steps=self.warmup_num_steps, kind=self.warmup_type)
        return _between(self.min_lrs, self.max_lrs, height)


class WarmupDecayLR(Schedule):
    """Rise as `WarmupLR`, then fall linearly to `warmup_min_lr`, reached at iteration `total_num_steps`.

    Raises ConfigError naming every parameter that is wrong.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = check_arguments(self, locals())
        self.min_lrs, self.max_lrs = _warmup_range(optimizer, given)
        self.warmup_num_steps, self.total_num_steps = _durations(given)
        self.warmup_type = given["warmup_type"]
        super().__init__(optimizer, last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        if iteration < self.warmup_num_steps:
            height = warmup_ramp(iteration, num_steps=self.warmup_num_steps, kind=self.warmup_type)
        else:
            height = linear_decay(iteration, begin=self.warmup_num_steps, end=self.total_num_steps)
        return _between(self.min_lrs, self.max_lrs, height)


class WarmupCosineLR(Schedule):
    """Rise from `warmup_min_ratio` to 1 times each group's own rate, then fall along a cosine to `cos_min_ratio` times
    it, reached one iteration before `total_num_steps`, and stay there.

    Raises ConfigError naming every parameter that is wrong.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = check_arguments(self, locals())
        self.warmup_num_steps, self.total_num_steps = _durations(given)
        self._start_ratio, self._end_ratio = given["warmup_min_ratio"], given["cos_min_ratio"]
        self.warmup_type = given["warmup_type"]
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        ratio = self._ratio_at(iteration)
        return [lr * ratio for lr in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """The present factor of each group's own rate."""
        return self._ratio_at(self.last_batch_iteration)

    def _ratio_at(self, iteration: int) -> float:
        warmup, total = self.warmup_num_steps, self.total_num_steps
        if iteration >= warmup:
            return cosine_decay(iteration, begin=warmup, end=total, floor_ratio=self._end_ratio)
        height = warmup_ramp(iteration, num_steps=warmup, kind=self.warmup_type)
        return float(self._start_ratio + (1.0 - self._start_ratio) * height)


class OneCycle(Schedule):
    """The 1-cycle policy (Smith 2018): the rate goes from `cycle_min_lr` up to `cycle_max_lr` in
    `cycle_first_step_size` steps and back in `cycle_second_step_size` (None: as many), while the momentum goes the
    other way between `cycle_max_mom` and `cycle_min_mom`.

    After the cycle the rate is `cycle_min_lr / (1 + decay_lr_rate * n)` and the momentum
    `cycle_max_mom * (1 + decay_mom_rate * n)`, where n counts `decay_step_size` steps (0: no decay) in fractions. The
    momentum is the first of `betas`, or `momentum` where that is not 0; groups with neither keep what they have.
    Stair counts (second None: as the first) hold the values in so many stairs. Raises ConfigError naming every
    parameter that is wrong; a momentum that has grown to 1 is refused when it does.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        given = check_arguments(self, locals())
        groups = optimizer.param_groups
        self.min_lrs, self.max_lrs = _range(groups, given, "cycle_min_lr", "cycle_max_lr")
        self.min_moms, self.max_moms = _range(groups, given, "cycle_min_mom", "cycle_max_mom")
        self._lr_rate, self._mom_rate = given["decay_lr_rate"], given["decay_mom_rate"]
        self.cycle = CycleShape(
            first_steps=given["cycle_first_step_size"],
            second_steps=given["cycle_second_step_size"],
            first_stairs=given["cycle_first_stair_count"],
            second_stairs=given["cycle_second_stair_count"],
            decay_steps=given["decay_step_size"],
        )
        self._cycles_momentum = given["cycle_momentum"]
        if self._cycles_momentum and not any("betas" in group or group.get("momentum") for group in groups):
            _LOG.warning("OneCycle: cycle_momentum has no effect, no optimizer group has betas or a momentum")
            self._cycles_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    @property
    def step_ratio(self) -> float:
        """The part of the cycle in which the rate rises."""
        return self.cycle.first_steps / self.cycle.total_steps

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """The betas, or the momentum, of each group at the present iteration; None where they are left alone."""
        momenta = self.momenta_at(self.last_batch_iteration)
        if momenta is None:
            return None
        groups = zip(self.optimizer.param_groups, momenta, strict=True)
        return [(momentum, *group.get("betas", ())[1:]) for group, momentum in groups]

    def lrs_at(self, iteration: int) -> list[float]:
        if self.cycle.has_ended(iteration):
            decay = 1.0 + self._lr_rate * self.cycle.decay_intervals(iteration)
            return [lr / decay for lr in self.min_lrs]
        return _between(self.min_lrs, self.max_lrs, self.cycle.height(iteration))

    def momenta_at(self, iteration: int) -> list[float] | None:
        if not self._cycles_momentum:
            return None
        if not self.cycle.has_ended(iteration):
            return _between(self.max_moms, self.min_moms, self.cycle.height(iteration))
        growth = 1.0 + self._mom_rate * self.cycle.decay_intervals(iteration)
        momenta = [momentum * growth for momentum in self.max_moms]
        if max(momenta, default=0.0) >= 1.0:
            expected = f"the momentum has grown to {max(momenta):.6g} at iteration {iteration}; it must stay under 1"
            hint = "lower it, or raise decay_step_size"
            raise ConfigError([Problem("scheduler.params.decay_mom_rate", self._mom_rate, expected, hint)])
        return momenta


class LRRangeTest(Schedule):
    """The range test (Smith 2018): the rate starts at `lr_range_test_min_lr` and grows by `lr_range_test_step_rate`
    times that in every `lr_range_test_step_size` steps, to find the largest rate that still trains.

    Raises ConfigError naming every parameter that is wrong.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        given = check_arguments(self, locals())
        self.min_lrs = _per_group(optimizer.param_groups, given, "lr_range_test_min_lr")
        self._step_size, self._step_rate = given["lr_range_test_step_size"], given["lr_range_test_step_rate"]
        self._staircase = given["lr_range_test_staircase"]
        super().__init__(optimizer, last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        factor = range_test_factor(
            iteration, step_size=self._step_size, step_rate=self._step_rate, staircase=self._staircase
        )
        return [lr * factor for lr in self.min_lrs]


SCHEDULES: Mapping[str, type[Schedule]] = {
    cls.__name__: cls
    for cls in (
        *(WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest),
        *(PhasedLR, WarmupStableDecayLR, WarmupCosineRestartsLR, WarmupInverseSqrtLR),
    )
}
"""The names that a config's `scheduler.type` can have, upper and lower case as here."""


def build_schedule(type_name: str, params: Mapping[str, Any], optimizer: HasParamGroups) -> Schedule:
    """Return the schedule `type_name` with the `params` of a config. Raises ConfigError with near names."""
    if type_name not in SCHEDULES:
        expected = f"expected one of {', '.join(SCHEDULES)}"
        raise ConfigError([Problem("scheduler.type", type_name, expected, _nearest(type_name))])
    return SCHEDULES[type_name](optimizer, **schedule_arguments(type_name, params))


def _nearest(name: str) -> str:
    """A hint for an unknown schedule, or nothing."""
    found = [known for known in SCHEDULES if known.lower() == name.lower()] or get_close_matches(name, SCHEDULES, n=1)
    return f"did you mean {found[0]!r}?" if found else ""


def _between(lows: Sequence[float], highs: Sequence[float], height: float) -> list[float]:
    return [low + (high - low) * height for low, high in zip(lows, highs, strict=True)]


def _per_group(groups: Sequence[Any], given: Mapping[str, Any], key: str) -> list[float]:
    """One number for each of the optimizer's `groups`. Raises ConfigError for a list of another length."""
    value = given[key]
    if not isinstance(value, Sequence):
        return [float(value)] * len(groups)
    if len(value) != len(groups):
        expected = f"{len(value)} numbers for {len(groups)} optimizer groups"
        hint = f"give one number for all groups, or {len(groups)}"
        raise ConfigError([Problem(f"scheduler.params.{key}", value, expected, hint)])
    return [float(one) for one in value]


def _range(groups: Sequence[Any], given: Mapping[str, Any], low: str, high: str) -> tuple[list[float], list[float]]:
    """Two numbers for each group. Raises ConfigError where the `low` one is above the `high` one."""
    lows, highs = _per_group(groups, given, low), _per_group(groups, given, high)
    if any(small > large for small, large in zip(lows, highs, strict=True)):
        raise ConfigError([Problem(f"scheduler.params.{low}", lows, f"is more than {high} = {highs}", "swap the two")])
    return lows, highs


def _warmup_range(optimizer: HasParamGroups, given: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    groups = optimizer.param_groups
    if given["warmup_max_lr"] is None:
        return _per_group(groups, given, "warmup_min_lr"), [float(group["lr"]) for group in groups]
    return _range(groups, given, "warmup_min_lr", "warmup_max_lr")


def _durations(given: Mapping[str, Any]) -> tuple[int, int]:
    """Iterations of the warmup (at least 2) and of the whole schedule."""
    warmup, total = max(2, given["warmup_num_steps"]), given["total_num_steps"]
    if total < warmup:
        _LOG.warning("total_num_steps %d is less than warmup_num_steps %d: it ends while warming up", total, warmup)
    return warmup, total
