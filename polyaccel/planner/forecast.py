"""The needs of one rank under every setting of stage and offload: memory, traffic of a step, disk of a checkpoint.

All of it is a sum over the plan from which the engine itself allocates (`policies.step_plan_for`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from polyaccel.comm.benchmark import CollectiveTimings
from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import mesh_of
from polyaccel.config.sections.offload import OffloadDevice
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.engine.policies.steps import PLACES, plan_for, step_plan_for, step_policy, storage_tier
from polyaccel.planner.model import ModelShape, comm_seconds
from polyaccel.planner.optimizer_needs import OptimizerNeeds
from polyaccel.zero.plan.bucket_plan import StepPlan
from polyaccel.zero.plan.layout import ShardLayout
from polyaccel.zero.plan.memory import MemoryEstimate, estimate_memory
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.plan.traffic import StepTraffic, step_traffic


@dataclass(frozen=True, slots=True)
class Setting:
    """A choice of `zero_optimization.stage`, `offload_optimizer.device` and `offload_param.device`."""

    stage: int
    offload: OffloadDevice
    offload_param: OffloadDevice = "none"

    @classmethod
    def from_config(cls, config: ResolvedConfig) -> Setting:
        """Read the config's own choice."""
        zero = config.zero_optimization
        return cls(zero.stage, zero.offload_optimizer.device, zero.offload_param.device)

    @property
    def offloaded(self) -> tuple[int, int]:
        """How far states and parameters leave the device; 0 is not at all."""
        places = list(Place)
        return places.index(storage_tier(self.offload)), places.index(storage_tier(self.offload_param))

    def applied_to(self, config: ResolvedConfig) -> ResolvedConfig:
        """`config` with this choice and everything else as it was."""
        zero = config.zero_optimization
        states = zero.offload_optimizer.model_copy(update={"device": self.offload})
        params = zero.offload_param.model_copy(update={"device": self.offload_param})
        changes = {"stage": self.stage, "offload_optimizer": states, "offload_param": params}
        return config.model_copy(update={"zero_optimization": zero.model_copy(update=changes)})


SETTINGS = (
    *(Setting(stage, offload) for stage, offload in product((0, 1, 2, 3), PLACES)),
    Setting(3, "cpu", "cpu"),
    Setting(3, "nvme", "cpu"),
    Setting(3, "nvme", "nvme"),
)
"""The settings that are worth comparing. States are larger than parameters, so they leave the device first."""


@dataclass(frozen=True, slots=True)
class CheckpointMemory:
    """Host memory that a rank's copies of its state take, in addition to the training itself: what a save in the
    background stages, as long as there is room, and replicas. On several hosts replicas take twice as much, the
    neighbour's too."""

    staging_nbytes: int
    replica_nbytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """The needs of a setting on each rank. `is_own`: it is the config's own setting.

    `comm_s` is the seconds that a step's collectives take by a measured table, one after another; None without a table.
    """

    setting: Setting
    memory: MemoryEstimate
    traffic: StepTraffic
    is_own: bool
    copies: CheckpointMemory
    comm_s: float | None = None

    def fits(self, *, device_nbytes: int | None, host_nbytes: int | None) -> bool:
        """Return whether peaks, replicas included, stay within limits (None: no limit)."""
        left = None if host_nbytes is None else host_nbytes - self.copies.replica_nbytes
        limits = {Place.DEVICE: device_nbytes, Place.HOST: left}
        return all(limit is None or self.memory.peak_nbytes(place) <= limit for place, limit in limits.items())


def forecasts(
    config: ResolvedConfig, model: ModelShape, world_size: int, speeds: CollectiveTimings | None = None
) -> tuple[Forecast, ...]:
    """Forecast `SETTINGS` and the config's own, by measured `speeds` of collectives if given."""
    own, copies = Setting.from_config(config), copies_of_state(config, model, world_size)
    found = []
    for setting in SETTINGS if own in SETTINGS else (*SETTINGS, own):
        changed = setting.applied_to(config)
        layout = layout_of(changed, model.specs, model.units, mesh_of(changed, world_size))
        plan = step_plan(changed, layout, is_remote=True)
        comm_s = None if speeds is None else comm_seconds(plan, speeds)
        found.append(Forecast(setting, estimate_memory(plan), step_traffic(plan), setting == own, copies, comm_s))
    return tuple(found)


def cheapest_first(found: Iterable[Forecast]) -> list[Forecast]:
    """Order by collective seconds if known, bytes sent, less offload, and device memory left."""
    return sorted(
        found,
        key=lambda forecast: (
            forecast.comm_s or 0.0,
            forecast.traffic.total_nbytes,
            forecast.setting.offloaded,
            forecast.memory.peak_nbytes(Place.DEVICE),
        ),
    )


def layout_of(config: ResolvedConfig, specs: Sequence[ParamSpec], units: Mapping[str, str], mesh: Mesh) -> ShardLayout:
    """The layout of parameters in the engine of `config`."""
    needs = OptimizerNeeds.of(config, specs)
    return plan_for(config, needs.specs, lambda: units, mesh, granules=needs.granules, costs=needs.costs)


def step_plan(config: ResolvedConfig, layout: ShardLayout, *, is_remote: bool) -> StepPlan:
    """The plan of the engine of `config` on each rank. `is_remote`: the device's memory is not the host's."""
    needs = OptimizerNeeds.of(config, layout.params)
    return step_plan_for(
        *(config, layout, needs.state_names),
        is_remote=is_remote,
        state_types=needs.state_types,
        group_states=needs.group_states,
    )


def checkpoint_nbytes(config: ResolvedConfig, model: ModelShape) -> int:
    """Disk for one checkpoint, all ranks together: parameters in the precision of their masters, states, buffers."""
    precision = step_policy(config).precision
    nbytes, needs = model.buffer_nbytes, OptimizerNeeds.of(config, model.specs)
    for spec in needs.specs:
        kept = precision.master_of(spec.dtype) if spec.trainable else spec.dtype
        held = [needs.state_types.get(name, precision.states_of(spec.dtype)) for name in needs.states_of(spec)]
        # Codes of 8 bits are saved as the numbers that they stand for.
        states = sum(4 if dtype is DType.UINT8 else dtype.itemsize for dtype in held)
        nbytes += spec.global_numel * (kept.itemsize + states)
    return nbytes


def copies_of_state(config: ResolvedConfig, model: ModelShape, world_size: int) -> CheckpointMemory:
    """What the config's copies of a rank's state take. At every stage each rank saves its share of everything."""
    share = -(-checkpoint_nbytes(config, model) // world_size)
    section = config.checkpoint
    return CheckpointMemory(share if section.in_background else 0, 2 * share if section.in_memory_section else 0)
