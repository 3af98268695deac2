"""`polyaccel.initialize` for JAX: a function of parameters, and a config, made into an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax

from polyaccel import comm
from polyaccel.comm.default import is_initialized, own_thread_communicator
from polyaccel.config import Config, ResolvedConfig, load_config
from polyaccel.config.meshes import shared_axes
from polyaccel.engine.lr_schedules import build_schedule
from polyaccel.engine.policies.compression import CompressionPolicy, compression_policy_of
from polyaccel.engine.policies.low_precision import low_precision_policy_of
from polyaccel.engine.runtime import EngineBuilder, build
from polyaccel.errors import ConfigError, Problem, ShardingError
from polyaccel.jax.carried_state import Reduction
from polyaccel.jax.compilation_cache import keep_compiled_programs
from polyaccel.jax.engine import JaxEngine
from polyaccel.jax.modules import trained_part, with_params
from polyaccel.jax.native.engine import NativeEngine
from polyaccel.jax.native.mesh import DeviceMesh, native_mesh
from polyaccel.jax.native_keys import asked_axes, axis_sizes, require_same_axes, without_axes
from polyaccel.jax.partitioned.config_axes import partition_of
from polyaccel.jax.partitioned.engine import PartitionedEngine, needs_leaves
from polyaccel.jax.partitioned.places import Partition, adopt_mesh, host_tree
from polyaccel.jax.pipeline_engine import JaxPipelineEngine
from polyaccel.jax.program.calls import engine_call, require_used_devices
from polyaccel.jax.pytree import require_only_params
from polyaccel.jax.rewrites import REWRITES, RewriteContext
from polyaccel.jax.training_states import taken_apart
from polyaccel.jax.verify.first_step import FirstStepProof
from polyaccel.jax.verify.plain_engine import PlainJaxEngine
from polyaccel.jax.verify.runs import config_without, float32_config, record_engine, switch_off
from polyaccel.jax.views_engine import ViewsEngine
from polyaccel.verify.variant import active_run
from polyaccel.zero.plan.policy import Placement


@engine_call
def initialize(
    model: Any,
    params: Any,
    *,
    state: Any,
    state_reduction: Reduction,
    optimizer: Any,
    config: str | Path | Mapping[str, Any] | Config,
    seed: int,
    stacked: Sequence[str],
    mesh: Any,
    param_specs: Any,
    batch_spec: Any,
    axis_rules: Any,
    distributed_port: int | None,
    dist_init_required: bool | None,
) -> JaxEngine:
    """Build an engine around `model`, a function or a module of flax or equinox; as `polyaccel.initialize`."""
    model, params, state, optimizer, begun = taken_apart(model, params, state, optimizer)
    require_only_params(params)
    parsed = load_config(config)
    trained = trained_part(model, params)
    partition = adopt_mesh(trained, mesh, param_specs, batch_spec, axis_rules)
    named = {"param_specs": param_specs, "batch_spec": batch_spec, "axis_rules": axis_rules}
    needs_mesh = _needs_mesh(parsed, partition, named)
    if (run := active_run()) is not None:
        parsed = float32_config(parsed)
    _check_groups(parsed, is_verified=run is not None)
    if not is_initialized() and dist_init_required is not False:
        comm.init_distributed(config=parsed, distributed_port=distributed_port)
    if needs_mesh:
        every = native_mesh()
        partition = partition_of(axis_sizes(parsed, every.world_size), every, trained, *named.values())
    if partition is not None:
        require_same_axes(parsed, partition.mesh.shape)
        parsed, params = without_axes(parsed), host_tree(params)
        model = with_params(model, host_tree) if params is None else model
    devices = _devices_for(parsed, partition)
    world_size = _ranks_of(devices, partition)
    runtime = build(parsed, world_size=world_size)
    own_parts = 1 if devices is None or partition is not None else len(devices.local)
    if run is not None and run.variant.without:
        parsed = config_without(parsed, runtime.config, own_parts, run.variant.without)
        devices = None if "jax" in run.variant.without else devices
        runtime = build(parsed, world_size=_ranks_of(devices, partition))
    runtime.apply_to_process()
    if parsed.jax.compilation_cache:
        keep_compiled_programs()
    _check_config(runtime)
    if devices is None and run is None:
        require_used_devices(runtime.communicator)

    given = RewriteContext(
        model=model,
        params=params,
        state=state,
        state_reduction=state_reduction,
        runtime=runtime,
        client=optimizer,
        seed=seed,
        stacked=stacked,
        own_devices=1 if devices is None else own_parts,
        partition=partition,
    )
    begun = None if begun is None else replace(begun, opt_state=host_tree(begun.opt_state))
    if run is not None:
        if run.variant.is_plain:
            return cast(JaxEngine, PlainJaxEngine(run, given, begun=begun))
        switch_off(given, run.variant.without)
    proof = None if run is not None else FirstStepProof.prepare(given, parsed)
    engine = compose(given, devices)
    if proof is not None:
        proof.attach(engine, lambda given: compose(given, devices if given.is_native else None))
    _add_schedule(engine, runtime, given)
    if begun is not None:
        begun.resume(engine)
    if run is not None:
        record_engine(run, engine)
    runtime.attend_exchanges(engine)
    return engine


def _needs_mesh(config: Config, partition: Partition | None, named: Mapping[str, Any]) -> bool:
    """Whether the engine makes the mesh that a config asks for. Raises ConfigError for meshes of views mode, and
    ShardingError for arguments that need one where there is none."""
    given = [name for name, value in named.items() if value is not None]
    if config.jax.execution != "native" and (partition is not None or given):
        hint = 'use "native", or pass whole arrays on one device and no mesh'
        expected = "views mode computes on one device a rank, and there is a mesh"
        raise ConfigError([Problem("jax.execution", config.jax.execution, expected, hint)], source="initialize")
    if partition is not None or config.jax.execution != "native":
        return False
    if given and given != ["axis_rules"] and not asked_axes(config):
        hint = 'pass mesh= with it, or let the config ask for axes: "mesh": {"tensor": 2}'
        raise ShardingError(f"{given[0]} was given without a mesh", hint=hint, value=given[0])
    return bool(given or asked_axes(config))


def _devices_for(config: Config, partition: Partition | None) -> DeviceMesh | None:
    """The devices of native mode: those of the script's mesh, or all. Collective."""
    if config.jax.execution != "native":
        return None
    every = native_mesh()
    return every if partition is None else partition.device_mesh()


def _ranks_of(devices: DeviceMesh | None, partition: Partition | None) -> int | None:
    """How many parts a batch has in native mode; None: as many as there are processes."""
    if devices is None:
        return None
    return devices.world_size if partition is None else partition.data_size


def compose(rewrites: RewriteContext, devices: DeviceMesh | None) -> JaxEngine:
    """Apply the rewrites, and build the engine of what they leave. Collective."""
    rewrites.apply([one for one in REWRITES if not one.needs_engine])
    if devices is not None:
        return (PartitionedEngine if needs_leaves(rewrites) else NativeEngine)(rewrites, devices)
    return ViewsEngine(rewrites) if rewrites.cut is None else JaxPipelineEngine(rewrites, rewrites.cut)


def _add_schedule(engine: JaxEngine, runtime: EngineBuilder, rewrites: RewriteContext) -> None:
    section = runtime.config.scheduler
    if section is not None:
        if not all("lr" in group for group in rewrites.groups):
            hint = 'use "optimizer" of the config with it; an optax transformation has its schedule inside'
            raise ConfigError([Problem("scheduler.type", section.type, "there is no learning rate to move", hint)])
        engine.lr_scheduler = build_schedule(section.type, section.params, engine.optimizer)


def _check_groups(parsed: Config, *, is_verified: bool) -> None:
    """Raise ConfigError for replica groups of what is not the engine's own buffers, or is run once more without it."""
    if parsed.diloco is None:
        return
    wrong = {
        "is not compared with plain JAX": is_verified,
        'needs the engine\'s own buffers, which "jax": {"execution": "views"} has': parsed.jax.execution == "native",
    }
    problems = [Problem("diloco", True, what, "leave it out there") for what, is_wrong in wrong.items() if is_wrong]
    if problems:
        raise ConfigError(problems)


def _check_config(runtime: EngineBuilder) -> None:
    """Raise ConfigError for what has no meaning for a JAX function, whatever rewrites are on."""
    config: ResolvedConfig = runtime.config
    is_native = config.jax.execution == "native"
    problems = []
    axes = [*shared_axes(config), ("expert", config.mesh_key("expert"), config.mesh.expert)]
    for axis, key, size in axes:
        if size == 1 or (axis == "pipe" and not is_native):
            continue
        expected = f"asks for ranks along the axis {axis!r}, which functions of JAX have on a mesh of native mode"
        hint = "leave it out" if axis == "pipe" else 'use it with "jax": {"execution": "native"}, or leave it out'
        problems.append(Problem(key, size, expected, hint))
    is_host = runtime.accelerator.works_on_host_memory and jax.default_backend() == "cpu"
    if runtime.policy.params is Placement.SHARDED and not is_host and not is_native:
        expected = f"JAX on {jax.default_backend()!r} cannot call into the engine to gather parameters"
        hint = "use stage 0 to 2, or the CPU: JAX_PLATFORMS=cpu and DS_ACCELERATOR=cpu"
        problems.append(Problem("zero_optimization.stage", config.zero_optimization.stage, expected, hint))
    of_threads = own_thread_communicator()
    if runtime.policy.params is Placement.SHARDED and of_threads is not None and of_threads.world_size > 1:
        expected = "ranks that are threads share XLA's threads, which programs hold while they wait for each other"
        hint = "start ranks as processes (polyaccel run), or use stage 0 to 2"
        problems.append(Problem("zero_optimization.stage", config.zero_optimization.stage, expected, hint))
    if not is_native and not runtime.accelerator.capabilities().mutable_buffers:
        expected = f"arrays on accelerator {runtime.accelerator.name!r} never change, and views of them show no update"
        problems.append(Problem("jax.execution", config.jax.execution, expected, 'use "native"'))
    if config.torch_autocast.enabled:
        problems.append(Problem("torch_autocast.enabled", True, "JAX has no autocast", 'use "bf16" or "fp16"'))
    if config.sparse_gradients:
        problems.append(Problem("sparse_gradients", True, "gradients of JAX are whole arrays", "leave it out"))
    if config.graphs != "off":
        problems.append(Problem("graphs", config.graphs, "XLA plans how a program is launched", "leave it out"))
    if config.generation.exact:
        problems.append(Problem("generation.exact", True, "engines of JAX do not generate", "leave it out"))
    if config.tiled_compute.enabled:
        hint = "map over tiles in the function: jax.lax.map and jax.checkpoint"
        problems.append(Problem("tiled_compute.enabled", True, "not available for JAX", hint))
    of_torch = {
        "rampup_batch_size": config.rampup_batch_size is not None,
        "curriculum_learning.enabled": config.curriculum_learning.enabled,
        "progressive_layer_drop.enabled": config.progressive_layer_drop.enabled,
        "data_efficiency.enabled": config.data_efficiency.enabled,
        "compression_training": compression_policy_of(config) != CompressionPolicy(),
    }
    if low_precision_policy_of(config) is not None:
        of_torch["low_precision_linear.recipe"] = True
    problems += [Problem(key, True, "is for torch modules", "leave it out") for key, on in of_torch.items() if on]
    if problems:
        raise ConfigError(problems, source="initialize")
