"""`polyaccel.initialize` for torch modules: everything that a training script passes, made into an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from polyaccel import comm
from polyaccel.accelerators.torch_device import require_torch_memory
from polyaccel.comm.default import is_initialized
from polyaccel.config import Config, ResolvedConfig, load_config
from polyaccel.config.meshes import on_mesh
from polyaccel.engine.batch_ramp import KEY as RAMP
from polyaccel.engine.lr_schedules import SCHEDULES, build_schedule
from polyaccel.engine.policies.compression import compression_policy_of
from polyaccel.engine.policies.data_sampling import sampling_policy_of, token_drop_policy_of
from polyaccel.engine.policies.generation import generation_policy_of
from polyaccel.engine.policies.modules import RecomputePolicy, module_rules_of, recompute_policy_of
from polyaccel.engine.policies.step_inputs import StepInputPolicy, step_input_policy_of
from polyaccel.engine.policies.watching import profile_settings_of
from polyaccel.engine.runtime import EngineBuilder, build
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.optimizer import schedule_class
from polyaccel.torch.compression.bits_by_curvature import BitsByCurvature
from polyaccel.torch.compression.in_step import CompressedStep
from polyaccel.torch.compression.layers import CompressedLayer
from polyaccel.torch.data import is_own_loader, require_dataset
from polyaccel.torch.deferred_init.init import outside_construction
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.experts.layer import loss_free_balancer
from polyaccel.torch.experts.load_metrics import ExpertLoadMetrics
from polyaccel.torch.layer_drop import drops_itself
from polyaccel.torch.loaders import loader_of
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.rewrites import REWRITES, RewriteContext
from polyaccel.torch.rewrites.base import OptimizerLike
from polyaccel.torch.rewrites.compression import compress_first, is_compressed
from polyaccel.torch.settings import ModuleSettings
from polyaccel.torch.sharding.engine_registry import load
from polyaccel.torch.sharding.leaf_modules import mark_configured_leaves
from polyaccel.torch.sharding.sharded import require_unsharded
from polyaccel.torch.step_inputs import StepInputs
from polyaccel.torch.tensor_parallel.megatron_compat import mesh_sizes, require_groups
from polyaccel.torch.token_batch_loader import KEY, ScaledUpdates
from polyaccel.torch.token_drop import TokenDrop
from polyaccel.torch.verify.first_step import FirstStepProof
from polyaccel.torch.verify.runs import (
    ALWAYS_ON,
    attributes_before,
    plain_run,
    record_engine,
    unstaged,
    verified_config,
)
from polyaccel.verify.variant import active_run
from polyaccel.zero.plan.policy import Placement
from polyaccel.zero.update.optimizers import SliceOptimizer


@outside_construction()
def initialize(
    model: Any,
    *,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    distributed_port: int | None,
    mpu: Any = None,
    mesh_param: Any = None,
    dist_init_required: bool | None,
    config: str | Path | Mapping[str, Any] | Config,
    engine_class: type[TorchEngine] = TorchEngine,
    pipeline_engine_class: type[PipelineEngine] = PipelineEngine,
    slice_optimizers: Mapping[str, Callable[[], SliceOptimizer]] = MappingProxyType({}),
) -> tuple[TorchEngine, Any, Any, Any]:
    """Build an engine around `model`; arguments and errors as in `polyaccel.initialize`.

    `engine_class`, and of a model over stages `pipeline_engine_class`, are for packages that give the engine more
    methods; `slice_optimizers` for those that compute one of the config's optimizers by another formula with the same
    states, by its name there.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        hint = "pass a torch.nn.Module, or params= too where the model is a function of JAX"
        raise PolyaccelError(f"expected a torch.nn.Module, got {kind}", hint=hint, value=kind)
    require_dataset(training_data)
    stages = model.mesh_sizes if isinstance(model, PipelineModule) and model.num_stages > 1 else {}
    parsed = on_mesh(load_config(config), {**mesh_sizes(mesh_param, mpu), **stages})
    if (run := active_run()) is not None:
        if parsed.diloco is not None:
            raise ConfigError([Problem("diloco", True, "is not compared with plain torch", "leave it out there")])
        parsed = verified_config(parsed, model, run.variant)
    if not is_initialized() and dist_init_required is not False:
        comm.init_distributed(config=parsed, distributed_port=distributed_port)
    runtime = replace(build(parsed), training_data=_described(training_data))
    load(model)
    runtime.enter_groups()
    require_groups(mpu, runtime.mesh, runtime.communicator.rank)
    require_torch_memory(runtime.accelerator)
    runtime.apply_to_process()
    require_unsharded(model)
    compress_first(model, runtime, optimizer, model_parameters)
    if run is not None and run.variant.is_plain:
        classes, of_data = (engine_class, pipeline_engine_class), (training_data, collate_fn)
        return plain_run(run, model, runtime, optimizer, model_parameters, *of_data, lr_scheduler, *classes)
    everything, attributes = runtime, attributes_before(run, model)
    if run is not None and "pipeline" in run.variant.without and runtime.mesh.has_several("pipe"):
        model, model_parameters, runtime, engine_class = unstaged(
            model, runtime, optimizer, model_parameters, pipeline_engine_class
        )
    has_own_mesh = mpu is not None or mesh_param is not None
    proof = None
    if run is None:
        proof = FirstStepProof.prepare(model, parsed, runtime, optimizer, has_own_mesh=has_own_mesh)
    rewrites = RewriteContext(
        model=model,
        runtime=runtime,
        settings=_module_settings(runtime.config),
        client=optimizer,
        model_parameters=model_parameters,
        slice_optimizers=slice_optimizers,
        has_own_mesh=has_own_mesh,
        without=frozenset(() if run is None else run.variant.without) - ALWAYS_ON,
    )
    engine = _compose(rewrites, engine_class, pipeline_engine_class)
    _attend_batch_ramp(runtime, engine, is_verified=run is not None)
    if proof is not None:
        proof.attach(engine, _compose_shadow)
    _attend_step_inputs(runtime, model, engine, is_verified=run is not None)
    _attend_token_drop(runtime, model, engine, is_verified=run is not None)
    engine.lr_scheduler = _make_schedule(runtime, engine, lr_scheduler)
    runtime.attend_exchanges(engine)
    if training_data is not None:
        engine.training_dataloader = loader_of(engine, training_data, collate_fn)
    if run is not None:
        record_engine(run, engine, everything, attributes)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _compose(
    rewrites: RewriteContext, engine_class: type[TorchEngine], pipeline_engine_class: type[PipelineEngine]
) -> TorchEngine:
    """Apply the rewrites, and build the engine of what they leave. Collective."""
    runtime = rewrites.runtime
    try:
        rewrites.apply([one for one in REWRITES if not one.needs_engine])
        if runtime.policy.params is Placement.SHARDED:
            mark_configured_leaves(rewrites.model, module_rules_of(runtime.config).leaves)
        engine = (pipeline_engine_class if rewrites.is_staged else engine_class)(rewrites)
    except BaseException:
        rewrites.remove(alone=True)
        raise
    _attend_experts(runtime, rewrites.model, engine)
    _attend_compression(runtime, rewrites.model, engine)
    if isinstance(engine, PipelineEngine):
        section = runtime.config.pipeline
        engine.compose_pipeline(section.schedule, section.chunks)
    return engine


def _compose_shadow(
    model: nn.Module, runtime: EngineBuilder, client: Any, groups: Any, without: frozenset[str]
) -> TorchEngine:
    """The engine of a copy of a model. Collective. See [Note: Proof at the first step]."""
    rewrites = RewriteContext(
        model=model,
        runtime=runtime,
        settings=_module_settings(runtime.config),
        client=client,
        model_parameters=groups,
        without=without - ALWAYS_ON,
    )
    return _compose(rewrites, TorchEngine, PipelineEngine)


def _attend_experts(runtime: EngineBuilder, model: nn.Module, engine: TorchEngine) -> None:
    """Let biases follow loads, and figures be taken where the config asks."""
    if (follow := loss_free_balancer(model, lambda: runtime.process_group_for(("data", "sequence")))) is not None:
        engine.after_update.append(follow)
    if runtime.config.expert_parallel.log_load:
        watched = ExpertLoadMetrics(model, runtime.process_group_for(("data", "sequence")))
        engine.expert_figures = watched.take
        runtime.cleanup_callbacks.append(watched.release)


def _attend_compression(runtime: EngineBuilder, model: nn.Module, engine: TorchEngine) -> None:
    """Let masks and ranges of compressed layers follow the engine's steps."""
    if is_compressed(model):
        counters = engine.counters
        ranks = partial(runtime.process_group_for, ("data", "sequence", "tensor"))
        step = CompressedStep(model, lambda: counters.global_steps, ranks)
        engine.before_forward.append(step.before_forward)
        engine.before_update.append(step.before_update)
        engine.after_step.append(step.after_step)
        runtime.cleanup_callbacks.append(step.release)
        _attend_curvature(runtime, model, engine)


def _attend_curvature(runtime: EngineBuilder, model: nn.Module, engine: TorchEngine) -> None:
    """Let weights lose bits by the curvature of their blocks, where the config asks. Raises ConfigError for what cannot
    be differentiated twice."""
    policy = compression_policy_of(runtime.config).curvature
    layers = [part for part in model.modules() if isinstance(part, CompressedLayer)]
    paces = [part.compression.pace for part in layers if part.compression.pace is not None]
    if policy is None or not paces:
        return
    recomputes = recompute_policy_of(runtime.config) != RecomputePolicy()
    wrong = {
        "needs whole parameters between forward and backward: stages 0 to 2": runtime.policy.params
        is Placement.SHARDED,
        "needs whole sequences on each rank": runtime.mesh.has_several("sequence"),
        "cannot differentiate what is recomputed": recomputes,
    }
    if reasons := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError([Problem("eigenvalue.enabled", True, reasons[0], "leave it out there")])
    blocks = model.get_submodule(policy.blocks)
    counters = engine.counters
    bits = BitsByCurvature(
        paces,
        [blocks[index] for index in range(policy.count)],  # type: ignore[index]
        policy,
        steps=lambda: counters.global_steps,
        ends_step=engine.is_gradient_accumulation_boundary,
        ranks=runtime.process_group_for(("data",)),
    )
    engine.before_forward.append(bits.before_forward)
    engine.before_backward.append(bits.before_backward)
    engine.after_step.append(bits.after_step)


def _attend_step_inputs(runtime: EngineBuilder, model: nn.Module, engine: TorchEngine, *, is_verified: bool) -> None:
    """Let inputs follow the engine's steps."""
    sampling = sampling_policy_of(runtime.config)
    if is_verified and sampling is not None and sampling.metrics:
        key, what = "data_efficiency.data_sampling.curriculum_learning.enabled", "is not compared with plain torch"
        raise ConfigError([Problem(key, True, what, "leave it out there")])
    if sampling is not None and sampling.token_batches is not None:
        _attend_token_batches(engine, sampling.token_batches.scaling, is_verified=is_verified)
    policy = step_input_policy_of(runtime.config)
    if policy == StepInputPolicy():
        return
    key = "curriculum_learning" if policy.length is not None else "progressive_layer_drop"
    if is_verified or isinstance(engine, PipelineEngine):
        what = "is not compared with plain torch" if is_verified else "does not reach the stages of a pipeline"
        raise ConfigError([Problem(f"{key}.enabled", True, what, "leave it out there")])
    counters = engine.counters
    if policy.layers is not None and not drops_itself(model):
        policy = replace(policy, layers=None)  # the engine skips blocks
    engine.step_inputs = StepInputs(model, policy, lambda: counters.global_steps)


def _attend_batch_ramp(runtime: EngineBuilder, engine: TorchEngine, *, is_verified: bool) -> None:
    """Let batches grow with the samples that were seen, where the config asks. Raises ConfigError for loaders that deal
    out whole batches."""
    numbers, sampling = runtime.config.rampup_batch_size, sampling_policy_of(runtime.config)
    if numbers is None:
        return
    deals_batches = sampling is not None and (bool(sampling.metrics) or sampling.token_batches is not None)
    wrong = {
        "is not compared with plain torch": is_verified,
        "does not reach loaders that deal out batches of one size": deals_batches,
    }
    if reasons := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError([Problem(RAMP, list(numbers), reasons[0], "leave it out there")])
    engine.ramp_train_batch_size(*numbers)


def _attend_token_batches(engine: TorchEngine, scaling: str, *, is_verified: bool) -> None:
    """Let learning rates follow the samples of each step."""
    optimizer = engine.zero.optimizer
    evaluates = isinstance(optimizer, ClientOptimizer) and optimizer.evaluates
    wrong = [
        (is_verified, "enabled", True, "is not compared with plain torch"),
        (
            isinstance(engine, PipelineEngine),
            "enabled",
            True,
            "has micro-batches of several sizes, and stages take one",
        ),
        (evaluates and scaling != "none", "lr_scaling_method", scaling, "does not reach optimizers with a closure"),
    ]
    if problems := [Problem(f"{KEY}.{key}", value, what, "leave it out there") for on, key, value, what in wrong if on]:
        raise ConfigError(problems)
    updates = ScaledUpdates(engine)
    engine.before_update.append(updates.before_update)
    engine.after_update.append(updates.after_update)


def _attend_token_drop(runtime: EngineBuilder, model: nn.Module, engine: TorchEngine, *, is_verified: bool) -> None:
    """Let chosen layers see a part of the tokens."""
    policy = token_drop_policy_of(runtime.config)
    if policy is None:
        return
    wrong = {
        "is not compared with plain torch": is_verified,
        "does not reach the stages of a pipeline": isinstance(engine, PipelineEngine),
        "needs whole sequences on each rank": runtime.mesh.has_several("sequence")
        or (runtime.mesh.has_several("tensor") and runtime.config.tensor_parallel.sequence_sharded),
    }
    if reasons := [what for what, is_wrong in wrong.items() if is_wrong]:
        key = "data_efficiency.data_routing.random_ltd.enabled"
        raise ConfigError([Problem(key, True, reasons[0], "leave it out there")])
    counters = engine.counters
    line = runtime.mesh.group(("data",), runtime.communicator.rank)
    place = line.index(runtime.communicator.rank)
    engine.token_drop = drop = TokenDrop(model, policy, place, lambda: (counters.global_steps, counters.micro_steps))
    runtime.cleanup_callbacks.append(drop.release)


def _described(training_data: Any) -> str:
    """How much data there is, in words that are equal on ranks whose loaders give equally many batches."""
    if training_data is None:
        return "no training_data"
    if is_own_loader(training_data):
        return "a loader of the script's own"
    return f"{len(training_data)} samples" if isinstance(training_data, Sized) else "samples that come one by one"


def _module_settings(config: ResolvedConfig) -> ModuleSettings:
    autocast, recompute = config.torch_autocast, recompute_policy_of(config)
    return ModuleSettings(
        autocast_dtype=getattr(torch, autocast.dtype) if autocast.enabled else None,
        recompute=None if recompute == RecomputePolicy() else recompute,
        checks_contents=config.zero_optimization.enable_sanity_checks,
        matrix_kernels="off" if config.generation.exact else config.matrix_kernels,  # their bits depend on the batch
        drop_last=config.dataloader_drop_last,
        sparse_gradients=config.sparse_gradients,
        profile=profile_settings_of(config),
        generation=generation_policy_of(config),
        sampling=sampling_policy_of(config),
    )


def _make_schedule(runtime: EngineBuilder, engine: TorchEngine, client: Any) -> Any:
    """The learning-rate schedule: the caller's, else the config's, else None."""
    if client is not None:
        is_instance = hasattr(client, "step") and hasattr(client, "state_dict")
        return client if is_instance else client(engine.optimizer)
    section = runtime.config.scheduler
    if section is None:
        return None
    if engine.optimizer is None:
        hint = 'add "optimizer" to the config or pass one'
        raise ConfigError([Problem("scheduler.type", section.type, "there is no optimizer to schedule", hint)])
    if section.type in SCHEDULES:
        return build_schedule(section.type, section.params, engine.optimizer)
    kind = schedule_class(section.type)
    try:
        return kind(engine.optimizer, **section.params)
    except (TypeError, ValueError) as error:
        expected = f"{section.type} refuses them: {error}"
        raise ConfigError([Problem("scheduler.params", dict(section.params), expected)]) from error
