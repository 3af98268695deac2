"""`polyaccel plan CONFIG MODEL -n N` where the config has stages: what a rank of each stage needs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from polyaccel.cli.plan.activations import share_layers, share_sequences
from polyaccel.cli.plan.tables import column_table, print_parts, short_bytes, short_count, titled
from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import mesh_of
from polyaccel.engine.policies.modules import module_rules_of, recompute_policy_of
from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.select import select_schedule
from polyaccel.pipeline.table import PipelineTable
from polyaccel.planner.activations import StageNeeds
from polyaccel.planner.assumptions import PlannedConfig
from polyaccel.planner.forecast import Forecast, Setting, forecasts
from polyaccel.zero.plan.placement import Place

_LEGEND = (
    "kept: the most forward passes that wait for their backward passes. state: parameters, master weights, optimizer "
    "states, gradients and what moves, at this config's setting. passing: the most bytes of activations at a time, of "
    "all that are kept, by the schedule's table. The framework's own memory is not included."
)


def run_stages(args: argparse.Namespace, planned: PlannedConfig) -> int:
    """Print what every stage needs. The exit code is 1 when limits were given and no setting lets all stages fit them.
    Raises PolyaccelError for a model that is a number, and for activations where ranks share experts."""
    config = planned.config
    mesh = mesh_of(config, args.world_size)
    table = _table(config, mesh.size_of(("pipe",)))
    needs = _needs(args, config, table)
    ranks = args.world_size // table.stages
    section = config.pipeline.model_copy(update={"stages": 1})
    alone = config.model_copy(update={"pipeline": section, "mesh": config.mesh.model_copy(update={"pipe": 1})})
    found = [forecasts(alone, each.model, ranks) for each in needs]
    fitting = _fitting(args, needs, found)
    if args.json:
        print(json.dumps(_as_json(planned, table, needs, found, fitting), indent=2))
    else:
        _print(planned, table, needs, found, fitting, ranks)
    return 0 if fitting else 1


def _table(config: ResolvedConfig, stages: int) -> PipelineTable:
    section = config.pipeline
    return select_schedule(section.schedule, stages, config.gradient_accumulation_steps, section.chunks or None)


def _needs(args: argparse.Namespace, config: ResolvedConfig, table: PipelineTable) -> tuple[StageNeeds, ...]:
    mesh = mesh_of(config, args.world_size)
    if config.pipeline.partition == "profiled":
        raise PolyaccelError(
            "layers that are dealt by their time cannot be dealt before they run", hint='use "partition": "parameters"'
        )
    expert_ranks = mesh.size_of(("expert",))
    if expert_ranks > 1 and args.sequence_length is not None:
        raise PolyaccelError(
            f"the activations of stages are not estimated where {expert_ranks} ranks share experts: how many tokens go "
            "where is not known",
            hint="leave --sequence-length out",
            value=expert_ranks,
        )
    from polyaccel.torch.estimate.stage_memory import estimate_stage_memory
    from polyaccel.torch.experts.models import cut_expert_shapes, has_experts

    def spread(model: Any) -> None:
        if has_experts(model):
            cut_expert_shapes(model, expert_ranks)

    rows = args.batch or config.train_micro_batch_size_per_gpu
    method = config.pipeline.partition
    return estimate_stage_memory(
        _builder(args, table.stages),
        None if args.sequence_length is None else (rows, args.sequence_length),
        module_rules_of(config),
        recompute_policy_of(config),
        table,
        "parameters" if method == "best" else method,
        autocast=config.torch_autocast.dtype if config.torch_autocast.enabled else None,
        share=lambda model: share_layers(model, config, mesh),
        spread=spread if expert_ranks > 1 else None,
        prepare=lambda model: share_sequences(model, config, mesh),
    )


def _builder(args: argparse.Namespace, stages: int) -> Callable[[], Any]:
    """What makes the model that `args.model` names, a directory or `module:function`."""
    from polyaccel.torch.estimate.meta_shapes import model_of_directory, model_of_function

    if Path(args.model).is_dir():
        return lambda: model_of_directory(Path(args.model))
    if ":" in args.model:
        return lambda: model_of_function(args.model, "on tensors without values")
    raise PolyaccelError(
        f"it is unknown along which blocks {args.model!r} is cut into {stages} stages",
        hint='give a directory with a config.json or module:function, or leave "pipeline" out; polyaccel plan '
        "--pipeline shows what stages do and how long",
        value=args.model,
    )


def _fitting(
    args: argparse.Namespace, needs: tuple[StageNeeds, ...], found: list[tuple[Forecast, ...]]
) -> list[Setting]:
    """The settings that let every stage fit."""
    fitting = []
    for each in zip(*found, strict=True):
        fits = True
        for stage, forecast in zip(needs, each, strict=True):
            left = None if args.limit_device is None else args.limit_device - (stage.peak_nbytes or 0)
            fits &= forecast.fits(device_nbytes=left, host_nbytes=args.limit_host)
        if fits:
            fitting.append(each[0].setting)
    return fitting


def _own(found: tuple[Forecast, ...]) -> Forecast:
    return next(forecast for forecast in found if forecast.is_own)


def _print(
    planned: PlannedConfig,
    table: PipelineTable,
    needs: tuple[StageNeeds, ...],
    found: list[tuple[Forecast, ...]],
    fitting: list[Setting],
    ranks: int,
) -> None:
    numel = sum(each.model.numel for each in needs)
    head = (
        f"{short_count(numel)} parameters over {table.stages} stages of {ranks} rank{'s' * (ranks != 1)} each; "
        f"{table.name}, {table.micro_batches} micro-batches, {table.chunks} chunks."
    )
    shown = column_table("stage", "blocks", "parameters", "kept", "state", "passing", "all")
    for stage, (each, forecasts_of) in enumerate(zip(needs, found, strict=True)):
        state = _own(forecasts_of).memory.peak_nbytes(Place.DEVICE)
        taken = each.peak_nbytes
        told = ("-", "-") if taken is None else (short_bytes(taken), short_bytes(state + taken))
        shown.add_row(
            *(str(stage), ",".join(each.blocks), short_count(each.model.numel)),
            *(str(each.kept), short_bytes(state), *told),
        )
    names = ", ".join(f"{one.stage} {one.offload}/{one.offload_param}" for one in fitting) or "none"
    parts = [Text(head), *(Text(f"Assumed: {sentence}.") for sentence in planned.assumptions)]
    parts.append(Text(f"Settings (ZeRO stage, offload of states/parameters) that fit on every stage: {names}."))
    print_parts([*parts[:-1], titled("Bytes of one rank on its device", shown), Text(_LEGEND), parts[-1]])


def _as_json(
    planned: PlannedConfig,
    table: PipelineTable,
    needs: tuple[StageNeeds, ...],
    found: list[tuple[Forecast, ...]],
    fitting: list[Setting],
) -> dict[str, Any]:
    return {
        "schedule": table.name,
        "micro_batches": table.micro_batches,
        "placement": list(table.placement),
        "assumptions": list(planned.assumptions),
        "stages": [
            {
                "blocks": list(each.blocks),
                "numel": each.model.numel,
                "kept": each.kept,
                "activations_peak_nbytes": each.peak_nbytes,
                "settings": [
                    {
                        **asdict(one.setting),
                        "is_own": one.is_own,
                        "peak_nbytes": {place.value: one.memory.peak_nbytes(place) for place in Place},
                    }
                    for one in forecasts_of
                ],
            }
            for each, forecasts_of in zip(needs, found, strict=True)
        ],
        "fitting": [asdict(setting) for setting in fitting],
    }
