"""The composition root: a config goes in, live parts come out, and the owner closes them.

Only this and `tiers` import both the config and the implementations. What a part needs of the config is handed to it as
a value of its kind (`StepPolicy`, `EngineSettings`, ...; `policies` makes them), so no part reads JSON keys.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from types import MappingProxyType
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.accelerators.memory.host import keep_freed_memory
from polyaccel.checkpoint.storage.base import Storage, open_storage
from polyaccel.comm.default import default_communicator
from polyaccel.comm.flight_recorder.summary import start_log
from polyaccel.config import Config, ResolvedConfig, resolve_config
from polyaccel.config.meshes import mesh_of
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.engine.base import Engine, EngineParts
from polyaccel.engine.mesh_groups import MeshGroups
from polyaccel.engine.model_adapter import ModelAdapter
from polyaccel.engine.policies.engines import common_settings_of, engine_settings_of, loss_scaler_of, replaced_values
from polyaccel.engine.policies.modules import param_dtype_of
from polyaccel.engine.policies.steps import plan_for, step_plan_for, step_policy
from polyaccel.engine.policies.watching import alarms_of, config_of_group, monitors_of, trace_of
from polyaccel.engine.rank_consistency import require_same_training, run_metadata, training_facts
from polyaccel.engine.replica_groups import make_replica_group
from polyaccel.engine.tiers import open_tiers
from polyaccel.errors import ConfigError, Problem
from polyaccel.job.trial_env import TrialModel, write_trial_model
from polyaccel.observability.console import show_log
from polyaccel.observability.setup import start_monitoring
from polyaccel.observability.timing import PhaseTimer
from polyaccel.observability.traces.recorder import RunTrace
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.outer_step import OuterStep, ReplicaGroup
from polyaccel.zero.plan.layout import Granule, ShardLayout
from polyaccel.zero.plan.policy import StepPolicy, ZeroPolicy
from polyaccel.zero.resources import StepResources
from polyaccel.zero.update.optimizers import Group, SliceOptimizer

log = getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineBuilder(MeshGroups):
    """The parts that a frontend builds an engine from."""

    config: ResolvedConfig
    accelerator: Accelerator
    policy: ZeroPolicy
    step_policy: StepPolicy
    param_dtype: DType | None
    """The element type in which floating parameters are held; None: as the model has them."""
    trace: RunTrace | None = None
    """What records the steps that are traced."""
    replica_group: ReplicaGroup | None = None
    """The ranks of `communicator` as one of several groups that train apart."""
    training_data: str = ""
    """How much data the engine's own loader has, in words. All ranks must have as much."""

    @property
    def casts_inputs(self) -> bool:
        """Whether floating inputs of the model become float16, as its parameters are."""
        return self.config.fp16.enabled and self.config.fp16.auto_cast

    def engine_parts(self) -> EngineParts:
        """Return the parts of every engine. Collective where the config has monitors or a folder."""
        monitor = start_monitoring(self.communicator, self.config.run_dir, monitors_of(self.config), self.about)
        return EngineParts(
            config=self.config,
            settings=engine_settings_of(self.config),
            accelerator=self.accelerator,
            communicator=self.communicator,
            mesh=self.mesh,
            loss_scaler=loss_scaler_of(self.config),
            monitor=monitor,
            trace=self.trace,
            alarms=alarms_of(self.config, self.communicator, self.mesh, monitor),
            about=self.about,
            replica_group=self.replica_group,
        )

    def attend_exchanges(self, engine: Engine) -> None:
        """Let the weights of replica groups meet, where there are some, and errors of quantised gradients follow the
        loss scale. Collective over all groups."""
        if isinstance(engine.zero, ZeroEngine) and engine.zero.plan.traffic.feedback is not None:
            engine.after_update.append(_ErrorsFollowScale(engine))
        group, policy = self.replica_group, self.step_policy.outer
        if group is not None and policy is not None and isinstance(engine.zero, ZeroEngine):
            outer = OuterStep(engine.zero, group, policy, lambda: engine.counters.global_steps)
            engine.after_step.append(outer.after_step)
            self.cleanup_callbacks.append(outer.settle)

    def leave_groups(self) -> None:
        super().leave_groups()
        if self.replica_group is not None and not self.borrows_groups:
            self.replica_group.across.close()
            self.replica_group.inside.close()

    @cached_property
    def about(self) -> dict[str, Any]:
        """The `run_metadata` of this run."""
        storage = self.config.checkpoint.storage_plugin[0]
        return run_metadata(self.config.public_tree(), storage, self.accelerator, self.mesh)

    def apply_to_process(self) -> None:
        """Apply the process-wide settings: kept memory, log, ignored values, garbage collection, shown config."""
        if self.accelerator.works_on_host_memory:
            keep_freed_memory()
        show_log(self.communicator.rank, self.config.log_level)
        if self.config.disable_python_gc:
            gc.disable()
        replaced = replaced_values(self.config, os.environ)
        for sentence in (*self.config.without_effect, *replaced) if self.communicator.rank == 0 else ():
            log.info("config: %s", sentence)
        if self.config.dump_state and self.communicator.rank == 0:
            log.info("resolved config:\n%s", self.config.to_json(secrets=False))

    def zero_step(
        self,
        adapter: ModelAdapter,
        optimizer: SliceOptimizer | None,
        groups: Sequence[Group],
        timer: PhaseTimer,
        *,
        resident: bool = False,
    ) -> ZeroEngine:
        """Return the ZeRO step of `adapter`'s model. Collective; raises ShardingError where ranks differ."""
        specs, kind = tuple(adapter.param_specs()), None if optimizer is None else optimizer.kind
        facts = training_facts(specs, kind, groups, common_settings_of(self.config), self.about)
        require_same_training(self.communicator, [*facts, self.training_data])
        granules, costs = ({}, {}) if optimizer is None else (optimizer.granules(specs), optimizer.costs(specs))
        self._require_parts_of_batches()
        layout = self.plan(
            specs,
            adapter.unit_names,
            rooms=self._max_local_numels(specs),
            parts=adapter.part_names(),
            updates=adapter.update_names(),
            granules=granules,
            costs=costs,
        )
        states: dict[str, Any] = {"state_names": ()}
        if optimizer is not None:
            averages = self.step_policy.engine_states
            states = {
                "state_names": (*optimizer.state_names, *averages),
                "state_types": {**optimizer.state_types, **dict.fromkeys(averages, DType.FLOAT32)},
                "group_states": {group: (*own, *averages) for group, own in optimizer.group_states.items()},
            }
        is_remote = host_accelerator(self.accelerator) is not self.accelerator
        if self.communicator.rank == 0:
            write_trial_model(os.environ, lambda: self._trial_model(specs, adapter.unit_names(), is_remote=is_remote))
        rank = self.communicator.rank
        plan = step_plan_for(self.config, layout, is_remote=is_remote, rank=rank, **states)
        run = self.accelerator, self.communicator, self.trace
        tiers = open_tiers(self.config, plan.offload, *run, resident=resident)
        has_streams = self.accelerator.capabilities().streams
        communicators = self.communicators(layout, plan.traffic, has_streams=has_streams)
        parts = StepResources(self.accelerator, communicators, tiers)
        return ZeroEngine(plan, parts, adapter, optimizer, groups, timer)

    def _require_parts_of_batches(self) -> None:
        """Raise ConfigError where the noise scale is wanted, and ranks share samples."""
        names = [name for name in ("sequence", "expert") if self.mesh.has_several(name)]
        names += [] if self.model_parallel_group is None else ["pipe"]
        if self.config.gradient_noise_scale is not None and names:
            expected = f"norms of parts of a batch are not known with mesh.{names[0]}"
            raise ConfigError([Problem("gradient_noise_scale", True, expected, "leave the key out")])

    def _trial_model(self, specs: tuple[ParamSpec, ...], units: Mapping[str, str], *, is_remote: bool) -> TrialModel:
        """What a tuner receives about the model, before there are buffers."""
        memory = self.accelerator.memory_stats()
        others = {axis.name: axis.size for axis in self.mesh.axes if axis.name != "data"}
        return TrialModel(specs, units, memory.allocated_nbytes, is_remote, memory.total_nbytes, others)

    def plan(
        self,
        specs: tuple[ParamSpec, ...],
        units: Callable[[], Mapping[str, str]],
        *,
        rooms: Mapping[str, int] = MappingProxyType({}),
        parts: Mapping[str, str] = MappingProxyType({}),
        updates: Mapping[str, str] = MappingProxyType({}),
        granules: Mapping[str, Granule] = MappingProxyType({}),
        costs: Mapping[str, int] = MappingProxyType({}),
    ) -> ShardLayout:
        """Lay out `specs` by the config over the mesh; see `plan_for`."""
        return plan_for(self.config, specs, units, self.mesh, rooms, parts, updates, granules, costs)

    def _max_local_numels(self, specs: tuple[ParamSpec, ...]) -> dict[str, int]:
        """The most elements that any rank holds of each parameter that is cut. Collective where there is one."""
        cut = [spec for spec in specs if spec.cut]
        gathered = self.communicator.all_gather_object([spec.numel for spec in cut]) if cut else []
        return {spec.fqn: max(numels) for spec, numels in zip(cut, zip(*gathered, strict=True), strict=True)}

    def of_stage(self) -> EngineBuilder:
        """The runtime of the ranks that have the same layers: itself where there is no pipeline. Collective there."""
        if self.mesh.size_of(("pipe",)) == 1:
            return self
        settings = common_settings_of(self.config)
        require_same_training(self.communicator, training_facts((), None, (), settings, self.about))
        mesh = Mesh(tuple(axis for axis in self.mesh.axes if axis.name != "pipe"))
        ranks, beyond = self.process_group_for(self.mesh.others(("pipe",))), self.process_group_for(("pipe",))
        return replace(
            self, communicator=ranks, mesh=mesh, model_parallel_group=beyond, cleanup_callbacks=[], _groups={}
        )

    def with_config(self, parsed: Config, *, world_size: int | None = None) -> EngineBuilder:
        """Return the parts of a second engine on the same ranks, with the groups of this one, which outlives it."""
        second = build(parsed, world_size=world_size, replica_group=self.replica_group)
        return replace(second, trace=None, borrows_groups=True, _groups=self._groups)

    def storage(self, location: str) -> Storage:
        """The storage that `checkpoint.storage` names, at `location`."""
        name, options = self.config.checkpoint.storage_plugin
        return open_storage(name, location, options)


class _ErrorsFollowScale:
    """Lets errors of quantised gradients begin at zero when the loss scale changes, of which they are multiples."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scale = engine.loss_scaler.loss_scale

    def __call__(self, applied: bool) -> None:
        del applied
        if (scale := self._engine.loss_scaler.loss_scale) != self._scale and isinstance(self._engine.zero, ZeroEngine):
            self._scale = scale
            self._engine.zero.forget_errors()


def build(
    parsed: Config,
    hints: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    replica_group: ReplicaGroup | None = None,
) -> EngineBuilder:
    """Return the runtime of a config; `hints` resolve `"auto"`, `world_size` counts other than processes. Collective
    where the config has replica groups, unless this rank's `replica_group` exists already."""
    communicator = default_communicator()
    if parsed.diloco is not None:
        replica_group = replica_group or make_replica_group(communicator, parsed.diloco.replica_groups)
        communicator, parsed = replica_group.inside, config_of_group(parsed, replica_group.index)
    config = resolve_config(parsed, world_size=world_size or communicator.world_size, hints=hints)
    accelerator = communicator.accelerator
    param_dtype = param_dtype_of(config)
    if param_dtype is not None and param_dtype not in accelerator.supported_dtypes():
        key = "fp16.enabled" if config.fp16.enabled else "bf16.enabled"
        known = ", ".join(sorted(dtype.value for dtype in accelerator.supported_dtypes() if dtype.is_floating))
        expected = f"accelerator {accelerator.name!r} does not compute in {param_dtype.value}"
        raise ConfigError([Problem(key, True, expected, f"use one of its types: {known}")])
    _check_storage(config)
    logger = config.comms_logger
    if logger.enabled:
        ops = () if logger.prof_all else logger.prof_ops
        start_log(communicator, ops, verbose=logger.verbose, callers=logger.debug)
    return EngineBuilder(
        config=config,
        accelerator=accelerator,
        communicator=communicator,
        policy=ZeroPolicy.of_stage(config.zero_optimization.stage),
        step_policy=step_policy(config),
        param_dtype=param_dtype,
        mesh=mesh_of(config, world_size or communicator.world_size),
        trace=trace_of(config, communicator),
        replica_group=replica_group,
    )


def _check_storage(config: ResolvedConfig) -> None:
    """Raise what is wrong with the options of `checkpoint.storage` now, not after hours of training."""
    name, options = config.checkpoint.storage_plugin
    plugin = load_plugin(PluginGroup.STORAGE, name, Storage, Storage.API_VERSION)
    try:
        plugin.check_options(options)
    except ConfigError as error:
        problems = [replace(problem, key=f"checkpoint.storage.{problem.key}") for problem in error.problems]
        raise ConfigError(problems) from None
