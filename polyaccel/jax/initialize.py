"""`polyaccel.initialize` for JAX: a function of parameters, and a config, made into an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from polyaccel import comm
from polyaccel.comm.default import is_initialized, own_thread_communicator
from polyaccel.config import Config, ResolvedConfig, load_config
from polyaccel.config.meshes import shared_axes
from polyaccel.engine.lr_schedules import build_schedule
from polyaccel.engine.policies.modules import RecomputePolicy, recompute_policy_of
from polyaccel.engine.runtime import EngineBuilder, build
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.jax.engine import JaxEngine
from polyaccel.jax.modules import as_function
from polyaccel.jax.native.engine import NativeEngine
from polyaccel.jax.native.mesh import native_mesh
from polyaccel.jax.optax_on_tree import optax_optimizer
from polyaccel.jax.pipeline import LayerList
from polyaccel.jax.pipeline_engine import JaxPipelineEngine
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.pytree import require_only_params
from polyaccel.jax.views_engine import ViewsEngine
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.pipeline.select import select_schedule
from polyaccel.zero.plan.policy import Placement
from polyaccel.zero.update.optimizers import SliceOptimizer

_RECOMPUTATION = frozenset({"enabled", "keep"})
"""The keys of `activation_checkpointing` that mean something for JAX."""


@engine_call
def initialize(
    model: Any,
    params: Any,
    *,
    optimizer: Any,
    config: str | Path | Mapping[str, Any] | Config,
    seed: int,
    stacked: Sequence[str],
    distributed_port: int | None,
    dist_init_required: bool | None,
) -> JaxEngine:
    """Build an engine around `model`; arguments and errors as in `polyaccel.initialize`. Modules of flax and equinox
    are taken too, see `polyaccel.jax.modules`."""
    require_only_params(params)
    parsed = load_config(config)
    if not is_initialized() and dist_init_required is not False:
        comm.init_distributed(config=parsed, distributed_port=distributed_port)
    mesh = native_mesh() if parsed.jax.execution == "native" else None
    runtime = build(parsed, world_size=None if mesh is None else mesh.world_size)
    runtime.apply_to_process()
    layers = LayerList.of(model, params) if isinstance(model, (list, tuple)) else None
    _check_config(runtime, is_native=mesh is not None, is_list=layers is not None)
    fn, tree = as_function(model, params) if layers is None else (layers, list(params))
    is_replicated = runtime.policy.optim is not Placement.SHARDED or runtime.communicator.world_size == 1
    may_be_whole = is_replicated and mesh is None and not stacked and runtime.mesh.size_of(("pipe",)) == 1
    slices, hyperparameters = _make_optimizer(runtime, optimizer, tree, may_be_whole=may_be_whole)
    engine: JaxEngine
    if layers is not None and runtime.mesh.size_of(("pipe",)) > 1:
        asked, stages = runtime.config.pipeline, runtime.mesh.size_of(("pipe",))
        table_for = partial(select_schedule, asked.schedule, stages, chunks=asked.chunks or None)
        table = table_for(runtime.config.gradient_accumulation_steps)
        method = "parameters" if asked.partition == "best" else asked.partition
        engine = JaxPipelineEngine(layers, params, runtime, slices, hyperparameters, seed, table, table_for, method)
    else:
        engine = (
            ViewsEngine(fn, tree, runtime, slices, hyperparameters, seed, stacked)
            if mesh is None
            else NativeEngine(fn, tree, runtime, slices, hyperparameters, seed, mesh)
        )
    section = runtime.config.scheduler
    if section is not None:
        if "lr" not in hyperparameters:
            hint = 'use "optimizer" of the config with it; an optax transformation has its schedule inside'
            raise ConfigError([Problem("scheduler.type", section.type, "there is no learning rate to move", hint)])
        engine.lr_scheduler = build_schedule(section.type, section.params, engine.optimizer)
    return engine


def _check_config(runtime: EngineBuilder, *, is_native: bool, is_list: bool) -> None:
    """Raise ConfigError for what has no meaning for a JAX function, or does not exist yet."""
    config: ResolvedConfig = runtime.config
    problems = _native_problems(runtime) if is_native else []
    for axis, key, size in shared_axes(config):
        if axis == "pipe" and not is_native:
            problems += _pipeline_problems(runtime, key, size, is_list=is_list)
            continue
        expected = f"asks for ranks along the axis {axis!r}, and functions of JAX train on that of data alone"
        problems.append(Problem(key, size, expected, "leave it out"))
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
    if config.tiled_compute.enabled:
        hint = "map over tiles in the function: jax.lax.map and jax.checkpoint"
        problems.append(Problem("tiled_compute.enabled", True, "not available for JAX", hint))
    recompute = recompute_policy_of(config)
    for key, value in config.activation_checkpointing.model_dump().items():
        if value and key not in _RECOMPUTATION and recompute != RecomputePolicy():
            key = f"activation_checkpointing.{key}"
            problems.append(Problem(key, value, "not available for JAX", "use jax.checkpoint in the function"))
    if others := [name for name in config.activation_checkpointing.keep if name != "matmul"]:
        problems.append(Problem("activation_checkpointing.keep", others, "not available for JAX", 'keep "matmul"'))
    if problems:
        raise ConfigError(problems, source="initialize")


def _pipeline_problems(runtime: EngineBuilder, key: str, stages: int, *, is_list: bool) -> Iterator[Problem]:
    """Settings of the config that stages of JAX do not have."""
    section = runtime.config.pipeline
    if not is_list:
        hint = "give initialize a list of functions layer(params, value, rng), and params as a list of as many"
        yield Problem(key, stages, "cuts a model that is a list of layers, and this is one function", hint)
    if runtime.policy.params is Placement.SHARDED:
        zero, expected = runtime.config.zero_optimization.stage, "stages of JAX have their parameters whole"
        yield Problem("zero_optimization.stage", zero, expected, "use stage 0 to 2")
    if section.partition.lower() == "profiled":
        expected, hint = "functions of JAX are not tried", 'use "parameters", "uniform" or "type:REGEX"'
        yield Problem("pipeline.partition", section.partition, expected, hint)
    if interval := section.activation_checkpoint_interval:
        hint = "use jax.checkpoint in the layers"
        yield Problem("pipeline.activation_checkpoint_interval", interval, "not available for JAX", hint)
    if runtime.config.activation_checkpointing.enabled:
        key, expected = "activation_checkpointing.enabled", "not available for stages of JAX"
        yield Problem(key, True, expected, "use jax.checkpoint in the layers")


def _native_problems(runtime: EngineBuilder) -> list[Problem]:
    """Settings of the config that native mode does not have."""
    config, zero = runtime.config, runtime.config.zero_optimization
    problems = []
    if runtime.policy.params is Placement.SHARDED:
        expected = "native mode shards no parameters: its one program would hold all of them gathered"
        problems.append(Problem("zero_optimization.stage", zero.stage, expected, 'use stage 2, or "views"'))
    if zero.offload_optimizer.device != "none":
        key = "zero_optimization.offload_optimizer.device"
        expected = "native mode updates inside one program of JAX's devices, where the states rest"
        hint = 'cut them over more devices (stage 1 or 2), or use "views", which offloads'
        problems.append(Problem(key, zero.offload_optimizer.device, expected, hint))
    if config.comms_logger.enabled:
        expected = "what JAX exchanges inside a program is not seen"
        problems.append(Problem("comms_logger.enabled", True, expected, "use jax.profiler"))
    return problems


def _make_optimizer(
    runtime: EngineBuilder, client: Any, params: Any, *, may_be_whole: bool
) -> tuple[SliceOptimizer | None, dict[str, Any]]:
    """The optimizer on slices and its hyperparameters: the caller's, else the config's, else none."""
    if client is not None:
        if not (callable(getattr(client, "init", None)) and callable(getattr(client, "update", None))):
            kind = type(client).__name__
            has_one = callable(getattr(getattr(client, "tx", None), "update", None))
            hint = "pass an optax transformation, or name the optimizer in the config"
            hint = "pass its transformation, optimizer.tx; the engine makes the states" if has_one else hint
            raise PolyaccelError(f"a {kind} is not an optax transformation", hint=hint, value=kind)
        return optax_optimizer(client, params, runtime.param_dtype, may_be_whole=may_be_whole), {}
    section = runtime.config.optimizer
    native = runtime.native_optimizer()
    if native is not None:
        return native
    if section is not None:
        hint = f"use one of {', '.join(OPTIMIZERS)}, or pass an optax transformation as optimizer="
        raise ConfigError([Problem("optimizer.type", section.type, "is not available for JAX", hint)])
    return None, {}
