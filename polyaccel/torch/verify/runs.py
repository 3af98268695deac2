"""The runs of a verification, as `initialize` starts them. See [Note: Shadow runs] in `polyaccel.verify.variant`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from polyaccel.config import Config
from polyaccel.engine.lr_schedules import SCHEDULES, build_schedule
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.torch.api.fragments import safe_get_full_fp32_param, safe_get_full_grad
from polyaccel.torch.api.optimizer import schedule_class
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.stage_module import cut_of
from polyaccel.torch.sharding.tensor_shard import Blocks
from polyaccel.torch.verify.plain_engine import OptimizerLike, PlainEngine
from polyaccel.torch.verify.recording import StepRecording
from polyaccel.torch.verify.shadow import WithoutDropout, shadow_config
from polyaccel.verify.variant import ActiveRun, Variant

ALWAYS_ON = frozenset({"optimizer", "zero_optimization"})
"""Rewrites without which an engine cannot train; without ZeRO's shards it trains at stage 0."""
_SHARED_AXES = ("pipe", "sequence", "tensor")


def verified_config(config: Config, model: nn.Module, variant: Variant) -> Config:
    """Return the config of a run: float32, small thresholds, and stage 0 where ZeRO's shards are off."""
    shadow = shadow_config(config, model)
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
) -> tuple[Any, Any, Any, Any]:
    """Return what `initialize` returns, with plain torch in place of the engine. Collective."""
    if isinstance(model, PipelineModule) and model.num_stages > 1:
        raise PolyaccelError(
            f"a rank has the layers of one of {model.num_stages} stages, and cannot run the module alone",
            hint="verify the program with num_stages=1, or give a model that is cut along its list of blocks",
            value=model.num_stages,
        )
    engine = PlainEngine(run, model, runtime, client, model_parameters, records_draws=not shares_samples(runtime))
    _enter_mode(runtime)
    section = runtime.config.scheduler
    if lr_scheduler is not None:
        is_instance = hasattr(lr_scheduler, "step") and hasattr(lr_scheduler, "state_dict")
        engine.lr_scheduler = lr_scheduler if is_instance else lr_scheduler(engine.optimizer)
    elif section is not None and section.type in SCHEDULES:
        engine.lr_scheduler = build_schedule(section.type, section.params, engine.optimizer)
    elif section is not None:
        engine.lr_scheduler = schedule_class(section.type)(engine.optimizer, **section.params)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def record_engine(run: ActiveRun, engine: TorchEngine) -> None:
    """Let the steps of `engine` be recorded, without dropout where ranks share samples. Collective at each step."""
    record_steps(run, engine)
    _enter_mode(engine.runtime)


def record_steps(run: ActiveRun, engine: TorchEngine) -> None:
    """Let the steps of `engine` be recorded. Collective at each step."""
    specs = {spec.fqn: spec for spec in engine.adapter.param_specs()}
    blocks = Blocks(specs, engine._stage_runtime.process_group_for)

    def whole(name: str, value: Tensor | None) -> Tensor | None:
        return None if value is None else blocks.gather_full(name, value)

    recording = StepRecording(
        run,
        engine.communicator.rank,
        engine.module,
        gradient_of=lambda name, parameter: whole(name, safe_get_full_grad(parameter)),
        value_of=lambda name, parameter: whole(name, safe_get_full_fp32_param(parameter)),
        groups=lambda: engine.optimizer.param_groups,
        records_draws=not shares_samples(engine.runtime),
        buffers_elsewhere=() if (cut := cut_of(engine.module)) is None else cut.buffers_elsewhere,
    )
    acted = run.record_of(engine.communicator.rank).acted
    for one in engine.rewrites:
        acted[one.name] = acted.get(one.name, 0) + len(one.modules) + len(one.parameters)
    engine.before_update.append(recording.before_update)

    def end_step(loss: float | None) -> None:
        recording.after_update(engine.get_global_grad_norm())
        recording.end_step(loss)

    engine.after_step.append(end_step)


def shares_samples(runtime: EngineBuilder) -> bool:
    """Whether several ranks compute parts of one sample, and draw other random numbers than one rank would."""
    return any(runtime.mesh.has_several(axis) for axis in _SHARED_AXES)


def _enter_mode(runtime: EngineBuilder) -> None:
    """Switch dropout off on this thread, for the rest of the run, where ranks draw other numbers by design."""
    if shares_samples(runtime):
        WithoutDropout().__enter__()  # type: ignore[no-untyped-call]
