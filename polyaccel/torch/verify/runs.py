"""The runs of a verification, as `initialize` starts them. See [Note: Shadow runs] in `polyaccel.verify.variant`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.config import Config
from polyaccel.engine.lr_schedules import SCHEDULES, build_schedule
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.torch.api.fragments import peek_full, safe_get_full_fp32_param, safe_get_full_grad
from polyaccel.torch.api.optimizer import schedule_class
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.experts.layer import loss_free_balancer
from polyaccel.torch.loaders import loader_of
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.stage_module import cut_of
from polyaccel.torch.sharding.tensor_shard import Blocks
from polyaccel.torch.verify.plain_engine import OptimizerLike, PlainEngine, shares_samples
from polyaccel.torch.verify.plain_pipeline import PlainPipelineEngine, UnstagedEngine
from polyaccel.torch.verify.recording import Quantities, StepRecording, attributes_of
from polyaccel.torch.verify.saved_runs import keep_saves_apart
from polyaccel.torch.verify.shadow import ChoiceWatch, OtherOrder, WithoutDropout, quiet_config, shadow_config
from polyaccel.torch.verify.states import engine_states
from polyaccel.torch.verify.whole_pipeline import whole_optimizer, whole_pipeline
from polyaccel.verify.variant import ActiveRun, Variant
from polyaccel.zero.fragments import GRAD, PARAM

__all__ = ["ALWAYS_ON", "plain_run", "record_engine", "record_steps", "shares_samples", "unstaged", "verified_config"]

ALWAYS_ON = frozenset({"compression_training", "optimizer", "zero_optimization"})
"""Rewrites without which an engine cannot train; without ZeRO's shards it trains at stage 0."""


def verified_config(config: Config, model: nn.Module, variant: Variant) -> Config:
    """Return the config of a run: float32, small thresholds, and stage 0 where ZeRO's shards are off."""
    shadow = quiet_config(shadow_config(config, model))
    if "zero_optimization" in variant.without:
        stage_0 = shadow.zero_optimization.model_copy(update={"stage": 0})
        shadow = shadow.model_copy(update={"zero_optimization": stage_0})
    return shadow


def plain_run(
    run: ActiveRun,
    model: nn.Module,
    runtime: EngineBuilder,
    client: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    lr_scheduler: Any,
    engine_class: type[TorchEngine],
    pipeline_engine_class: type[PipelineEngine],
) -> tuple[Any, Any, Any, Any]:
    """Return what `initialize` returns, with plain torch in place of the engine. Collective."""
    is_staged = isinstance(model, PipelineModule) or runtime.mesh.has_several("pipe")
    model, model_parameters = _whole(model, runtime, client, model_parameters)
    of_plain = PlainPipelineEngine if is_staged else PlainEngine
    of_script = pipeline_engine_class if is_staged else engine_class
    # What scripts find in an engine of their package they find here; what it computes is plain torch.
    made: type[PlainEngine] = type(f"Plain{of_script.__name__}", (of_plain, of_script), {})
    engine = made(run, model, runtime, client, model_parameters)
    _enter_modes(run, runtime)
    if (follow := loss_free_balancer(model, lambda: runtime.process_group_for(("data", "sequence")))) is not None:
        engine.after_update.append(follow)
    section = runtime.config.scheduler
    if lr_scheduler is not None:
        is_instance = hasattr(lr_scheduler, "step") and hasattr(lr_scheduler, "state_dict")
        engine.lr_scheduler = lr_scheduler if is_instance else lr_scheduler(engine.optimizer)
    elif section is not None and section.type in SCHEDULES:
        engine.lr_scheduler = build_schedule(section.type, section.params, engine.optimizer)
    elif section is not None:
        engine.lr_scheduler = schedule_class(section.type)(engine.optimizer, **section.params)
    if training_data is not None:
        engine.training_dataloader = loader_of(engine, training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _whole(
    model: nn.Module, runtime: EngineBuilder, client: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> tuple[nn.Module, Iterable[Any] | None]:
    """All stages of a model, and the parameters of all that the script gave those of this stage of. Collective where
    ranks have stages."""
    if not runtime.mesh.has_several("pipe"):
        return model, model_parameters
    if isinstance(model, PipelineModule):
        if model.num_stages == 1:
            return model, model_parameters
        stages = runtime.process_group_for(("pipe",))
        whole = whole_pipeline(model, stages, torch_device_of(runtime.accelerator))
        return whole, whole_optimizer(model, whole, stages, client, model_parameters)
    if type(model) is nn.Sequential:
        return PipelineModule(list(model.children()), 1, loss_fn=getattr(model, "loss_fn", None)), model_parameters
    return model, model_parameters


def unstaged(
    model: nn.Module,
    runtime: EngineBuilder,
    client: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    pipeline_engine_class: type[PipelineEngine],
) -> tuple[nn.Module, Iterable[Any] | None, EngineBuilder, type[PipelineEngine]]:
    """Return what an engine without the cut into stages is made of: the ranks of all stages train the whole model.
    Collective."""
    whole, given = _whole(model, runtime, client, model_parameters)
    alone = replace(runtime.of_stage(), model_parallel_group=None)
    made: type[PipelineEngine] = type("Unstaged", (UnstagedEngine, pipeline_engine_class), {})
    return whole, given, alone, made


def record_engine(
    run: ActiveRun, engine: TorchEngine, runtime: EngineBuilder, attributes: Mapping[str, float] | None = None
) -> None:
    """Let the steps of `engine` be recorded, without dropout where ranks share samples. Collective at each step.

    `attributes` are the model's before its first rewrite, and `runtime` has all ranks.
    """
    if isinstance(engine, UnstagedEngine):
        engine.mesh = runtime.mesh
        engine.stand_at(runtime)
    keep_saves_apart(run, engine)
    record_steps(run, engine, runtime, attributes)
    _enter_modes(run, runtime)


def record_steps(
    run: ActiveRun,
    engine: TorchEngine,
    runtime: EngineBuilder | None = None,
    attributes: Mapping[str, float] | None = None,
) -> None:
    """Let the steps of `engine` be recorded. Collective at each step."""
    runtime = runtime or engine.runtime
    acted = run.record_of(runtime.communicator.rank).acted
    for rewrite in engine.rewrites:
        acted[rewrite.name] = acted.get(rewrite.name, 0) + len(rewrite.modules) + len(rewrite.parameters)
    if engine.zero.optimizer is None:
        return
    specs = {spec.fqn: spec for spec in engine.adapter.param_specs()}
    blocks = Blocks(specs, engine._stage_runtime.process_group_for)
    shapes = {fqn: torch.Size(spec.shape) for fqn, spec in specs.items() if spec.trainable}
    cut = cut_of(engine.module)

    def whole(name: str, parameter: nn.Parameter, kind: str) -> Tensor | None:
        if not blocks.is_cut(name):
            return peek_full(parameter, kind)
        value = safe_get_full_grad(parameter) if kind == GRAD else safe_get_full_fp32_param(parameter)
        return None if value is None else blocks.gather_full(name, value)

    read = Quantities(
        gradient_of=partial(whole, kind=GRAD),
        value_of=partial(whole, kind=PARAM),
        states=lambda: engine_states(engine.zero, blocks, shapes),
        groups=lambda: engine.optimizer.param_groups,
        shares_samples=shares_samples(runtime),
        splits_inputs=runtime.mesh.has_several("sequence") or runtime.mesh.has_several("pipe"),
        attributes=None if runtime.mesh.has_several("pipe") else attributes,
        foreign_buffers=frozenset() if cut is None else frozenset(cut.foreign_buffers),
    )
    recording = StepRecording(run, runtime.communicator.rank, engine, engine.module, read)
    # A rank may have had no pass at the boundary: the update reduces there, and gradients are read before it.
    engine.before_update += [engine.zero.reducer.prepare_update, recording.before_update]

    def end_step(loss: float | None) -> None:
        recording.after_update(engine.get_global_grad_norm())
        recording.end_step(loss)

    engine.after_step.append(end_step)


def _enter_modes(run: ActiveRun, runtime: EngineBuilder) -> None:
    """Change what this thread computes, for the rest of the run: without dropout where ranks draw other numbers by
    design, and in another order where the run does."""
    if shares_samples(runtime):
        WithoutDropout().__enter__()  # type: ignore[no-untyped-call]
    if run.variant.reorders:
        OtherOrder().__enter__()  # type: ignore[no-untyped-call]
    if run.variant.noise:
        ChoiceWatch(run.record_of(runtime.communicator.rank)).__enter__()  # type: ignore[no-untyped-call]


def attributes_before(run: ActiveRun | None, model: nn.Module) -> Mapping[str, float] | None:
    """The numbers that a model has as attributes before its first rewrite; None outside of verifications."""
    return None if run is None else dict(attributes_of(model))
