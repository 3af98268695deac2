"""The section `scheduler`, and what the learning-rate schedules that polyaccel has by name take as `params`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from polyaccel.config.section import CountInt, Fraction, Listed, NonNegativeFloat, Params, PositiveInt, Section
from polyaccel.config.sections.optimizer import Beta

PerGroup = NonNegativeFloat | Listed[tuple[NonNegativeFloat, ...]]
"""One number, or one for each optimizer group."""


class SchedulerConfig(Section):
    """The learning-rate schedule to build when the caller passes none."""

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, polyaccel's own WarmupStableDecayLR,
    WarmupCosineRestartsLR, WarmupInverseSqrtLR and PhasedLR, or a class in torch.optim.lr_scheduler."""
    params: Params = Field(default_factory=dict, validate_default=True)
    """Its arguments. Those of the named schedules are checked; a torch class gets them as they are."""


class WarmupParams(Section):
    """WarmupLR: from the minimum to the maximum, then constant."""

    warmup_min_lr: PerGroup = 0.0
    """Learning rate at the start."""
    warmup_max_lr: PerGroup | None = None
    """Learning rate after the warm-up; null is each group's own."""
    warmup_num_steps: PositiveInt = 1000
    """Optimizer steps of the warm-up; fewer than 2 count as 2."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warm-up."""


class WarmupDecayParams(WarmupParams):
    """WarmupDecayLR: after the warm-up linearly down to 0."""

    total_num_steps: PositiveInt
    """The step at which the learning rate is 0."""
    warmup_max_lr: PerGroup | None = 0.001
    """Learning rate after the warm-up; null is each group's own."""


class WarmupCosineParams(Section):
    """WarmupCosineLR: after the warm-up down a half cosine. Ratios are of each group's own learning rate."""

    total_num_steps: PositiveInt
    """The step at which the floor is reached."""
    warmup_min_ratio: Fraction = 0.0
    """Ratio at the start."""
    warmup_num_steps: PositiveInt = 1000
    """Optimizer steps of the warm-up; fewer than 2 count as 2."""
    cos_min_ratio: Fraction = 0.0001
    """Ratio at the floor."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warm-up."""


class OneCycleParams(Section):
    """OneCycle (Smith 2018): one rise and fall of the learning rate, momentum the other way, then decay."""

    cycle_min_lr: PerGroup
    """Learning rate at the ends of the cycle."""
    cycle_max_lr: PerGroup
    """Learning rate at its top."""
    decay_lr_rate: NonNegativeFloat = 0.0
    """Decay of the learning rate after the cycle, for each `decay_step_size`."""
    cycle_first_step_size: PositiveInt = 2000
    """Steps of the rise."""
    cycle_second_step_size: CountInt | None = None
    """Steps of the fall; null is as many as of the rise, and 0 falls at once."""
    cycle_first_stair_count: CountInt = 0
    """Stairs in the rise; 0 is smooth."""
    cycle_second_stair_count: CountInt | None = None
    """Stairs in the fall; null is as many as in the rise."""
    decay_step_size: CountInt = 0
    """Steps of one decay interval; 0 is not a decay."""
    cycle_momentum: bool = True
    """Cycle the momentum (or the first beta) too."""
    cycle_min_mom: Beta | Listed[tuple[Beta, ...]] = 0.8
    """Momentum at the top of the cycle."""
    cycle_max_mom: Beta | Listed[tuple[Beta, ...]] = 0.9
    """Momentum at its ends."""
    decay_mom_rate: NonNegativeFloat = 0.0
    """Growth of the momentum after the cycle, for each `decay_step_size`."""


class LrRangeTestParams(Section):
    """LRRangeTest (Smith 2017): the learning rate grows until training diverges."""

    lr_range_test_min_lr: PerGroup = 1e-3
    """Learning rate at the start."""
    lr_range_test_step_size: PositiveInt = 2000
    """Steps of one interval."""
    lr_range_test_step_rate: NonNegativeFloat = 1.0
    """Growth for each interval, as a multiple of the start."""
    lr_range_test_staircase: bool = False
    """Grow at the ends of intervals only."""


class PhaseParams(Section):
    """A part of PhasedLR. Ratios are of each group's own learning rate."""

    steps: PositiveInt
    """Optimizer steps; of "inverse_sqrt" its time scale."""
    shape: Literal["constant", "linear", "cosine", "sqrt", "exponential", "inverse_sqrt"] = "linear"
    """How it gets from `start` to `end`. "inverse_sqrt" has no end, and `end` is its floor."""
    start: NonNegativeFloat
    """Ratio at its first step."""
    end: NonNegativeFloat
    """Ratio at the first step after it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shape == "exponential" and not (self.start and self.end):
            raise ValueError("exponential phases need ratios above 0")
        if self.shape == "constant" and self.start != self.end:
            raise ValueError("a constant phase has equal ratios")
        return self


class PhasedParams(Section):
    """PhasedLR: phases one after the other; the last ratio stays."""

    phases: Annotated[Listed[tuple[PhaseParams, ...]], Field(min_length=1)]
    """The phases: steps, shape, start, end."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(phase.shape == "inverse_sqrt" for phase in self.phases[:-1]):
            raise ValueError("inverse_sqrt has no end, so it comes last")
        return self


class WarmupStableDecayParams(Section):
    """WarmupStableDecayLR (WSD, Hu et al. 2024): up, constant, down. Ratios are of each group's own learning rate."""

    total_num_steps: PositiveInt
    """Optimizer steps of all three phases."""
    decay_num_steps: PositiveInt
    """Optimizer steps of the fall, the last ones."""
    warmup_num_steps: CountInt = 0
    """Optimizer steps of the linear rise."""
    warmup_min_ratio: Fraction = 0.0
    """Ratio at the start of the rise."""
    min_ratio: Fraction = 0.0
    """Ratio at the end."""
    decay_type: Literal["linear", "cosine", "sqrt", "exponential"] = "sqrt"
    """Shape of the fall; "sqrt" is 1 minus the root of the part done."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_num_steps + self.decay_num_steps > self.total_num_steps:
            raise ValueError("warmup_num_steps and decay_num_steps are together more than total_num_steps")
        if self.decay_type == "exponential" and not self.min_ratio:
            raise ValueError("an exponential fall needs a min_ratio above 0")
        return self


class WarmupCosineRestartsParams(Section):
    """WarmupCosineRestartsLR (SGDR, Loshchilov and Hutter 2016): half cosines that begin again."""

    cycle_num_steps: PositiveInt
    """Optimizer steps of the first cycle."""
    cycle_growth: Annotated[float, Field(ge=1)] = 1.0
    """Length of a cycle as a multiple of the one before."""
    warmup_num_steps: CountInt = 0
    """Optimizer steps of the linear rise."""
    warmup_min_ratio: Fraction = 0.0
    """Ratio at the start of the rise."""
    min_ratio: Fraction = 0.0
    """Ratio at the foot of each cycle, of each group's own learning rate."""
    top_factor: Fraction = 1.0
    """Ratio at the top of a cycle as a multiple of that of the one before."""


class WarmupInverseSqrtParams(Section):
    """WarmupInverseSqrtLR (Vaswani et al. 2017): up, then down with the root of the step."""

    warmup_num_steps: PositiveInt
    """Optimizer steps of the linear rise."""
    warmup_min_ratio: Fraction = 0.0
    """Ratio at the start of the rise."""
    timescale: PositiveInt | None = None
    """Steps after the rise that halve the square of the ratio; null is as many as of the rise."""
    min_ratio: Fraction = 0.0
    """Ratio that the fall ends at."""


SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LrRangeTestParams,
    "PhasedLR": PhasedParams,
    "WarmupStableDecayLR": WarmupStableDecayParams,
    "WarmupCosineRestartsLR": WarmupCosineRestartsParams,
    "WarmupInverseSqrtLR": WarmupInverseSqrtParams,
}
"""The schedules whose parameters we check."""
