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
from polyaccel.accelerators.torch_device import require_torch_memory, torch_device_of
from polyaccel.comm.default import is_initialized
from polyaccel.config import Config, ResolvedConfig, load_config
from polyaccel.config.meshes import on_mesh
from polyaccel.engine.lr_schedules import SCHEDULES, build_schedule
from polyaccel.engine.policies.modules import RecomputePolicy, cut_rules_of, module_rules_of, recompute_policy_of
from polyaccel.engine.policies.watching import profile_settings_of
from polyaccel.engine.runtime import EngineBuilder, build
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.pipeline.select import chosen_placement
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.api.client_optimizer import ClientOptimizer, needs_closure
from polyaccel.torch.api.optimizer import ParamGroups, make_groups, schedule_class, torch_optimizer
from polyaccel.torch.api.optimizer_proof import check_sliceable
from polyaccel.torch.context_parallel import SequenceSettings, apply_context_parallel
from polyaccel.torch.data import ShardedDataLoader, require_dataset
from polyaccel.torch.deferred_init.values import is_deferred, prepare
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.experts.balance import loss_free_balancer
from polyaccel.torch.experts.load_metrics import ExpertLoadMetrics
from polyaccel.torch.experts.models import has_experts, spread_experts
from polyaccel.torch.pipeline.measured_blocks import measured_blocks
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.stage_module import StageModule, cut_of
from polyaccel.torch.settings import ModuleSettings, TileSettings
from polyaccel.torch.sharding.engine_registry import load
from polyaccel.torch.sharding.leaf_modules import mark_configured_leaves
from polyaccel.torch.sharding.sharded import require_unsharded
from polyaccel.torch.sharding.specs import convert_buffers, require_own_memory
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel.make_plan import plan_by
from polyaccel.torch.tensor_parallel.megatron_compat import cut_as_megatron_says, mesh_sizes, require_groups
from polyaccel.torch.tensor_parallel.parallelize import parallelize_module
from polyaccel.torch.tiled.models import TiledModel
from polyaccel.zero.plan.policy import Placement
from polyaccel.zero.update.optimizers import SliceOptimizer

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


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
) -> tuple[TorchEngine, Any, ShardedDataLoader[Any] | None, Any]:
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
    if not is_initialized() and dist_init_required is not False:
        comm.init_distributed(config=parsed, distributed_port=distributed_port)
    runtime = replace(build(parsed), training_data=_described(training_data))
    load(model)
    runtime.enter_groups()
    require_groups(mpu, runtime.mesh, runtime.communicator.rank)
    device = torch_device_of(runtime.accelerator)
    require_torch_memory(runtime.accelerator)
    runtime.apply_to_process()
    require_unsharded(model)
    model, is_staged = _staged(runtime, model, optimizer)
    engine_class = pipeline_engine_class if is_staged else engine_class
    prepare(model)
    require_own_memory({fqn: one for fqn, one in model.named_parameters() if not is_deferred(one)})
    if cut_of(model) is None:
        cut_as_megatron_says(model, runtime.mesh, runtime.communicator.rank)
        _cut(runtime, model)
        _spread(runtime, model)
    _move(model, device)
    rules = module_rules_of(runtime.config)
    convert_buffers(model, rules.buffer_dtype, rules.keep_in_fp32)
    if runtime.policy.params is Placement.SHARDED:
        mark_configured_leaves(model, rules.leaves)
    _cut_sequences(runtime, model, is_own=mpu is not None or mesh_param is not None)
    _tile(runtime, model)
    slice_optimizer, groups = _make_optimizer(runtime, model, optimizer, model_parameters, slice_optimizers)
    engine = engine_class(model, runtime, slice_optimizer, groups, _module_settings(runtime.config))
    _attend_experts(runtime, model, engine)
    if isinstance(engine, PipelineEngine):
        section = runtime.config.pipeline
        engine.compose_pipeline(section.schedule, section.chunks)
    engine.lr_scheduler = _make_schedule(runtime, engine, lr_scheduler)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _staged(runtime: EngineBuilder, model: nn.Module, client: Any) -> tuple[nn.Module, bool]:
    """This rank's stage of `model`, and whether it is one; as it is where there are no stages. `client` is the
    optimizer that a script gives. Raises PolyaccelError for a model that cannot be cut."""
    section, stages = runtime.config.pipeline, runtime.mesh.size_of(("pipe",))
    if not isinstance(model, PipelineModule):
        if stages == 1:
            return model, False
        if isinstance(client, torch.optim.Optimizer):
            raise PolyaccelError(
                f"the {type(client).__name__} has parameters of all {stages} stages",
                hint='use "optimizer" in the config, give a function that makes it of parameters, or give it those of '
                "a PipelineModule",
            )
        method = "parameters" if section.partition in ("best", "parameters") else section.partition
        interval = section.activation_checkpoint_interval
        if type(model) is not nn.Sequential:
            if interval:
                expected = "a model that is cut by its blocks needs none"
                hint = 'say "activation_checkpointing": {"enabled": true}'
                raise ConfigError([Problem("pipeline.activation_checkpoint_interval", interval, expected, hint)])
            prepare(model)
            cut_as_megatron_says(model, runtime.mesh, runtime.communicator.rank)
            _cut(runtime, model)  # while the model is whole
            _spread(runtime, model)
            placement = chosen_placement(section.schedule, stages, section.chunks or None)
            stage = runtime.mesh.coordinates(runtime.communicator.rank)["pipe"]
            StageModule(model, placement, stage, method, partial(measured_blocks, ranks=runtime.communicator))
            return model, True
        model = PipelineModule(
            list(model),
            stages,
            loss_fn=getattr(model, "loss_fn", None),
            partition_method=method,
            activation_checkpoint_interval=interval,
            schedule=section.schedule,
            chunks=section.chunks,
            trial_inputs=getattr(model, "trial_inputs", None),
        )
    tensor_ranks = runtime.mesh.size_of(("tensor",))
    if tensor_ranks > 1:
        cut_as_megatron_says(model, runtime.mesh, runtime.communicator.rank)
    if stages > 1 and tensor_ranks > 1 and not cuts_of(model):
        raise PolyaccelError(
            f"the layers of a PipelineModule on {tensor_ranks} tensor ranks, which do not cut themselves",
            hint="give a model that is cut along its list of blocks, or layers with their own parallel_cuts",
            value=tensor_ranks,
        )
    place = runtime.mesh.coordinates(runtime.communicator.rank).get("pipe", 0)
    if model.num_stages == stages and model.stage != place:
        raise PipelineError(
            f"the PipelineModule of rank {runtime.communicator.rank} is stage {model.stage}, and the mesh has it on "
            f"stage {place}",
            hint="number ranks as the mesh does: neighbours share layers, and the stages come last",
            value=model.stage,
        )
    if model.num_stages != stages:
        raise PolyaccelError(
            f"the PipelineModule has {model.num_stages} stages, and the config {stages}",
            hint='leave "pipeline.stages" out of the config, or give num_stages the same number',
            value=model.num_stages,
        )
    return model, True


def _cut_sequences(runtime: EngineBuilder, model: nn.Module, *, is_own: bool) -> None:
    """Cut the sequences of `model` over the ranks along the axis `sequence`, unless it does that itself."""
    size, section = runtime.mesh.size_of(("sequence",)), runtime.config.sequence_parallel
    if size == 1 or section.method == "manual" or is_own:
        return
    settings = SequenceSettings(section.method, section.core_attention)
    runtime.cleanup_callbacks.append(
        apply_context_parallel(model, runtime.process_group_for(("sequence",)), settings).remove
    )


def _tile(runtime: EngineBuilder, model: nn.Module) -> None:
    """Let `model` compute in tiles, where the config says so."""
    section = runtime.config.tiled_compute
    if section.enabled:
        settings = TileSettings(**section.model_dump(exclude={"enabled"}))
        runtime.cleanup_callbacks.append(TiledModel(model, settings).release)


def _cut(runtime: EngineBuilder, model: nn.Module) -> None:
    """Cut `model` over the ranks along `tensor`, where there are some and it is not cut yet. Collective there.

    Raises ShardingError for a model that cannot be cut, ConfigError for one that has cut itself and is to share tokens.
    """
    if runtime.mesh.size_of(("tensor",)) == 1:
        return
    rules = cut_rules_of(runtime.config)
    if any("tensor" in cut.axes for cut in cuts_of(model).values()):
        if rules.share_tokens:
            expected, hint = "is nothing that can be done to a model that cuts itself", "leave it out"
            raise ConfigError([Problem("tensor_parallel.sequence_sharded", True, expected, hint)])
        return
    ranks = runtime.process_group_for(("tensor",))
    parallelize_module(model, ranks, plan_by(model, ranks.world_size, rules))


def _spread(runtime: EngineBuilder, model: nn.Module) -> None:
    """Spread the experts of `model` over the ranks along `expert`, where the config asks. A stage may have no experts,
    where another has. Collective. Raises ShardingError as `spread_experts`."""
    if not runtime.config.expert_parallel.enabled and runtime.mesh.size_of(("expert",)) == 1:
        return
    has = has_experts(model)
    if (
        runtime.mesh.has_several("pipe")
        and any(runtime.process_group_for(("pipe",)).all_gather_object(has))
        and not has
    ):
        return
    spread_experts(model, runtime.process_group_for(("expert",)))


def _attend_experts(runtime: EngineBuilder, model: nn.Module, engine: TorchEngine) -> None:
    """Let biases follow loads, and figures be taken where the config asks."""
    if (follow := loss_free_balancer(model, lambda: runtime.process_group_for(("data", "sequence")))) is not None:
        engine.after_update.append(follow)
    if runtime.config.expert_parallel.log_load:
        watched = ExpertLoadMetrics(model, runtime.process_group_for(("data", "sequence")))
        engine.expert_figures = watched.take
        runtime.cleanup_callbacks.append(watched.release)


def _described(training_data: Any) -> str:
    """How much data there is, in words that are equal on ranks whose loaders give equally many batches."""
    if training_data is None:
        return "no training_data"
    return f"{len(training_data)} samples" if isinstance(training_data, Sized) else "samples that come one by one"


def _module_settings(config: ResolvedConfig) -> ModuleSettings:
    autocast, recompute = config.torch_autocast, recompute_policy_of(config)
    return ModuleSettings(
        autocast_dtype=getattr(torch, autocast.dtype) if autocast.enabled else None,
        recompute=None if recompute == RecomputePolicy() else recompute,
        checks_contents=config.zero_optimization.enable_sanity_checks,
        matrix_kernels=config.matrix_kernels,
        drop_last=config.dataloader_drop_last,
        profile=profile_settings_of(config),
    )


def _move(model: nn.Module, device: torch.device) -> None:
    """Put `model` on `device`, every parameter the same object as before: optimizers and callers hold them.

    torch makes new ones where the device's tensors are of another kind than the CPU's; it can exchange what is in them
    instead.
    """
    future = torch.__future__
    as_before = future.get_swap_module_params_on_conversion()
    alike = torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))
    future.set_swap_module_params_on_conversion(as_before or not alike)
    try:
        model.to(device)
    finally:
        future.set_swap_module_params_on_conversion(as_before)


def _make_optimizer(
    runtime: EngineBuilder,
    model: nn.Module,
    client: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    slice_optimizers: Mapping[str, Callable[[], SliceOptimizer]],
) -> tuple[SliceOptimizer | None, ParamGroups]:
    """The optimizer on slices and its groups: the caller's, else the config's, else none."""
    section = runtime.config.optimizer
    if client is None:
        native = runtime.native_optimizer()
        if native is not None:
            slices, defaults = native
            if section is not None and section.type in slice_optimizers:
                slices = slice_optimizers[section.type]()
            return slices, make_groups(model_parameters, model, defaults)
        if section is None:
            return None, []  # nothing is trained, so there are no master weights and gradients
        client = torch_optimizer(section.type, section.params, make_groups(model_parameters, model, {}))
    elif not isinstance(client, torch.optim.Optimizer):
        client = client(make_groups(model_parameters, model, {}))
    _check_closure(client, runtime.config)
    flat = check_sliceable(
        client,
        sharded=runtime.policy.optim is Placement.SHARDED,
        allow_untested=runtime.config.zero_allow_untested_optimizer,
    )
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    groups = client.param_groups
    return ClientOptimizer(client, names, flat=flat), groups


def _check_closure(optimizer: torch.optim.Optimizer, config: ResolvedConfig) -> None:
    """Raise ConfigError where `optimizer` calls a closure for the loss (`needs_closure`), and this run cannot compute
    it again within a step."""
    if not needs_closure(optimizer):
        return
    reason = f"{type(optimizer).__name__} evaluates the loss several times a step"
    stage, steps = config.zero_optimization.stage, config.gradient_accumulation_steps
    problems = []
    if stage != 0:
        problems.append(Problem("zero_optimization.stage", stage, reason, "use stage 0"))
    for key in ("bf16", "fp16"):
        if getattr(config, key).enabled:
            problems.append(Problem(f"{key}.enabled", True, reason, "train in fp32"))
    if steps != 1:
        problems.append(Problem("gradient_accumulation_steps", steps, reason, "use 1; the closure may add losses up"))
    if (clipping := config.gradient_clipping) != 0.0:
        problems.append(Problem("gradient_clipping", clipping, reason, "call clip_grad_norm_ in the closure"))
    if problems:
        raise ConfigError(problems)


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
