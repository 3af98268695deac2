"""The plan of a training: a forecast for each setting, and those that fit the limits, cheapest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyaccel.comm.benchmark import CollectiveTimings
from polyaccel.config import ResolvedConfig
from polyaccel.pipeline.select import select_schedule
from polyaccel.pipeline.table import PipelineTable
from polyaccel.planner.assumptions import PlannedConfig
from polyaccel.planner.forecast import (
    CheckpointMemory,
    Forecast,
    Setting,
    cheapest_first,
    checkpoint_nbytes,
    copies_of_state,
    forecasts,
)
from polyaccel.planner.model import ActivationNeeds, ModelShape, StageNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes of memory that a rank may take on its device and on its host; None means without limit."""

    device_nbytes: int | None = None
    host_nbytes: int | None = None

    def admits(self, forecast: Forecast, activations_nbytes: int) -> bool:
        """Whether a setting and a pass's activations fit."""
        left = None if self.device_nbytes is None else self.device_nbytes - activations_nbytes
        return forecast.fits(device_nbytes=left, host_nbytes=self.host_nbytes)


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of `model` with `config` on `world_size` ranks. `assumptions` are sentences; `fitting` are those of
    `forecasts` that fit the limits, cheapest first. `speeds` are those of collectives, `compute_s` the seconds that a
    step computes."""

    model: ModelShape
    config: ResolvedConfig
    assumptions: Sequence[str]
    world_size: int
    forecasts: Sequence[Forecast]
    fitting: Sequence[Forecast]
    checkpoint_nbytes: int
    copies: CheckpointMemory
    limits: Limits
    speeds: CollectiveTimings | None = None
    compute_s: float | None = None
    activations: Sequence[ActivationNeeds] = ()

    def step_s(self, forecast: Forecast) -> float | None:
        """The seconds of a step whose communication overlaps nothing; None where a part of it is not known."""
        known = self.compute_s is not None and forecast.comm_s is not None
        return (self.compute_s or 0.0) + (forecast.comm_s or 0.0) if known else None


def plan_training(
    planned: PlannedConfig,
    model: ModelShape,
    world_size: int,
    limits: Limits,
    *,
    speeds: CollectiveTimings | None = None,
    compute_s: float | None = None,
    activations: Sequence[ActivationNeeds] = (),
) -> TrainingPlan:
    """Plan a training without pipeline stages. `activations` are those of a micro-batch, where they are known."""
    config = planned.config
    found = forecasts(config, model, world_size, speeds)
    taken = next((activation.peak_nbytes for activation in activations if activation.is_own), 0)
    return TrainingPlan(
        model=model,
        config=config,
        assumptions=planned.assumptions,
        world_size=world_size,
        forecasts=found,
        fitting=cheapest_first(forecast for forecast in found if limits.admits(forecast, taken)),
        checkpoint_nbytes=checkpoint_nbytes(config, model),
        copies=copies_of_state(config, model, world_size),
        limits=limits,
        speeds=speeds,
        compute_s=compute_s,
        activations=activations,
    )


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage of a pipeline: its needs, and a forecast of a rank there for each setting."""

    needs: StageNeeds
    forecasts: tuple[Forecast, ...]

    @property
    def own(self) -> Forecast:
        """The forecast of the config's own setting."""
        return next(forecast for forecast in self.forecasts if forecast.is_own)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The plan of a training by `table`, with `ranks` for each stage. `fitting` are the settings with which every stage
    fits the limits."""

    assumptions: Sequence[str]
    table: PipelineTable
    ranks: int
    stages: tuple[StagePlan, ...]
    fitting: tuple[Setting, ...]


def table_of(config: ResolvedConfig, stages: int) -> PipelineTable:
    """Return the schedule's table of `config` for so many stages."""
    section = config.pipeline
    return select_schedule(section.schedule, stages, config.gradient_accumulation_steps, section.chunks or None)


def plan_stages(
    planned: PlannedConfig, table: PipelineTable, needs: Sequence[StageNeeds], world_size: int, limits: Limits
) -> PipelinePlan:
    """Plan a training with pipeline stages, of which each has its `needs`."""
    config, ranks = planned.config, world_size // table.stages
    alone = config.model_copy(update={"mesh": config.mesh.model_copy(update={"pipe": 1})})
    stages = tuple(StagePlan(each, forecasts(alone, each.model, ranks)) for each in needs)
    fitting = tuple(
        each[0].setting
        for each in zip(*(stage.forecasts for stage in stages), strict=True)
        if all(
            limits.admits(forecast, stage.needs.peak_nbytes or 0) for stage, forecast in zip(stages, each, strict=True)
        )
    )
    return PipelinePlan(planned.assumptions, table, ranks, stages, fitting)
