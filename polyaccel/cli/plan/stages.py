"""`polyaccel plan CONFIG MODEL --ranks N` where the config has stages: what a rank of each stage needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from polyaccel.cli.plan.tables import UNITS, column_table, print_parts, short_bytes, short_count, titled
from polyaccel.config import ResolvedConfig
from polyaccel.config.meshes import mesh_of
from polyaccel.errors import PolyaccelError
from polyaccel.planner.assumptions import PlannedConfig
from polyaccel.planner.model import ActivationNeeds
from polyaccel.planner.pass_settings import PassSettings, check_activation_mesh, check_stage_settings
from polyaccel.planner.plan import Limits, PipelinePlan, plan_stages, table_of
from polyaccel.zero.plan.placement import Place


def estimated_activations(
    args: argparse.Namespace, config: ResolvedConfig, rows: int | None = None
) -> tuple[ActivationNeeds, ...]:
    """Return activation needs of `args.model` by rows; empty without `sequence_length`. Needs torch then."""
    if args.sequence_length is None:
        if args.batch is not None:
            raise PolyaccelError(
                f"--batch {args.batch}, and the length of its rows is not set",
                hint="add --sequence-length: activations depend on both",
                value=args.batch,
            )
        return ()
    if not Path(args.model).is_dir():
        raise PolyaccelError(
            f"the activations of {args.model!r} cannot be estimated: it is not a directory with a config.json",
            hint="leave --sequence-length out, or give the directory of a language model of transformers",
            value=args.model,
        )
    mesh = mesh_of(config, args.world_size)
    check_activation_mesh(mesh)
    from polyaccel.torch.estimate.rank_share import rank_activations

    settings = PassSettings.from_config(config, mesh)
    shape = (rows or args.batch or settings.micro_batch, args.sequence_length)
    return rank_activations(Path(args.model), shape, settings)


_LEGEND = (
    "kept: the most forward passes that wait for their backward passes. state: parameters, master weights, optimizer "
    "states, gradients and what moves, at this config's setting. passing: the most bytes of activations at a time, of "
    "all that are kept, by the schedule's table. The framework's own memory is not included."
)


def run_stages(args: argparse.Namespace, planned: PlannedConfig) -> int:
    """Print what every stage needs; return 1 if no setting fits the given limits."""
    mesh = mesh_of(planned.config, args.world_size)
    table, settings = table_of(planned.config, mesh.size_of(("pipe",))), PassSettings.from_config(planned.config, mesh)
    check_stage_settings(settings, with_activations=args.sequence_length is not None)
    from polyaccel.torch.estimate.rank_share import rank_stages

    rows = args.batch or settings.micro_batch
    shape = None if args.sequence_length is None else (rows, args.sequence_length)
    needs = rank_stages(args.model, shape, settings, table)
    limits = Limits(device_nbytes=args.memory, host_nbytes=args.host_memory)
    plan = plan_stages(planned, table, needs, args.world_size, limits)
    if args.json:
        print(json.dumps(_as_json(plan), indent=2))
    else:
        _print(plan)
    return 0 if plan.fitting else 1


def _print(plan: PipelinePlan) -> None:
    table, ranks = plan.table, plan.ranks
    numel = sum(stage.needs.model.numel for stage in plan.stages)
    head = (
        f"{short_count(numel)} parameters over {table.stages} stages of {ranks} rank{'s' * (ranks != 1)} each; "
        f"{table.name}, {table.micro_batches} micro-batches, {table.chunks} chunks."
    )
    shown = column_table("stage", "blocks", "parameters", "kept", "state", "passing", "all")
    for number, stage in enumerate(plan.stages):
        each, state = stage.needs, stage.own.memory.peak_nbytes(Place.DEVICE)
        taken = each.peak_nbytes
        cells = ("-", "-") if taken is None else (short_bytes(taken), short_bytes(state + taken))
        shown.add_row(
            *(str(number), ",".join(each.blocks), short_count(each.model.numel)),
            *(str(each.kept), short_bytes(state), *cells),
        )
    names = ", ".join(f"{one.stage} {one.offload}/{one.offload_param}" for one in plan.fitting) or "none"
    verdict = Text(f"Settings (ZeRO stage, offload of states/parameters) that fit on every stage: {names}.")
    parts = [verdict, Text(head), *(Text(f"Assumed: {sentence}.") for sentence in plan.assumptions)]
    print_parts([*parts, titled(f"Memory of one rank on its device ({UNITS})", shown), Text(_LEGEND)])


def _as_json(plan: PipelinePlan) -> dict[str, Any]:
    return {
        "schedule": plan.table.name,
        "micro_batches": plan.table.micro_batches,
        "placement": list(plan.table.placement),
        "assumptions": list(plan.assumptions),
        "stages": [
            {
                "blocks": list(stage.needs.blocks),
                "numel": stage.needs.model.numel,
                "kept": stage.needs.kept,
                "activations_peak_nbytes": stage.needs.peak_nbytes,
                "settings": [
                    {
                        **asdict(forecast.setting),
                        "is_own": forecast.is_own,
                        "peak_nbytes": {place.value: forecast.memory.peak_nbytes(place) for place in Place},
                    }
                    for forecast in stage.forecasts
                ],
            }
            for stage in plan.stages
        ],
        "fitting": [asdict(setting) for setting in plan.fitting],
    }
