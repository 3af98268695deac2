"""`polyaccel plan --pipeline SCHEDULE`: a pipeline's table, checked, timed and drawn. It needs no model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from polyaccel.cli.plan.tables import print_parts
from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.csv_schedule import read_table, write_table
from polyaccel.pipeline.messages import Programs, StageSend
from polyaccel.pipeline.render import to_svg
from polyaccel.pipeline.schedules import SCHEDULES, make_table
from polyaccel.pipeline.table import live_counts
from polyaccel.pipeline.timing import OpTimes, PipelineTiming, simulate

if TYPE_CHECKING:
    from polyaccel.pipeline.table import PipelineTable


def run_pipeline(args: argparse.Namespace) -> int:
    """Print what the table does, and write the requested files."""
    table = _table(args)
    programs = check_table(table)
    forward, backward_input, backward_weight = args.times
    times = OpTimes.even(table.chunks, forward, backward_input, backward_weight, args.transfer)
    timing = simulate(table, times)
    if args.json:
        print(json.dumps(_as_json(timing, programs), indent=2))
    else:
        _print(timing, programs, args)
    for path, text in ((args.svg, to_svg), (args.csv, lambda timing: write_table(timing.table))):
        if path is not None:
            _write(path, text(timing))
    return 0


def _table(args: argparse.Namespace) -> PipelineTable:
    """The published table of that name, or the one that a file has."""
    numbers = {"--stages": args.stages, "--micro-batches": args.micro_batches, "--chunks": args.chunks}
    if args.pipeline not in SCHEDULES and Path(args.pipeline).suffix.lower() == ".csv":
        for option, number in numbers.items():
            if number is not None:
                raise PolyaccelError(
                    f"{option} {number}, and {args.pipeline} sets that itself", hint="leave it out", value=number
                )
        return read_table(Path(args.pipeline))
    table = make_table(args.pipeline, args.stages or 1, args.micro_batches or 1, args.chunks)
    for option in ("--stages", "--micro-batches"):
        if numbers[option] is None:
            raise PolyaccelError(f"{table.name} needs {option}", hint=f"give {option} N", value=table.name)
    return table


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PolyaccelError(f"{path} cannot be written: {error}", hint="name another file", value=path) from error


def _sent(programs: Programs) -> list[int]:
    """Messages that each stage sends."""
    return [sum(isinstance(step, StageSend) for step in steps) for steps in programs]


def _print(timing: PipelineTiming, programs: Programs, args: argparse.Namespace) -> None:
    table = timing.table
    known = SCHEDULES.get(table.name)
    tasks = sum(map(len, table.tasks))
    head = (
        f"{table.name}: {table.stages} stages, {table.micro_batches} micro-batches, {table.chunks} chunks of the model."
        f"{f' {known.source}.' if known else ''}"
    )
    proved = (
        f"Checked: {tasks} tasks, each once and after what it needs; {sum(_sent(programs))} messages, received in the "
        "order in which they are sent; no stage waits for ever, even if a send ends only when its receive has begun."
    )
    shown = Table(box=None, pad_edge=False)
    for column in ("stage", "chunks", "tasks", "kept", "sent", "busy", "idle", "waiting"):
        shown.add_column(column, justify="left" if column in ("stage", "chunks") else "right", no_wrap=True)
    sent = _sent(programs)
    for stage, held in enumerate(table.tasks):
        chunks = ",".join(str(chunk) for chunk, at in enumerate(table.placement) if at == stage)
        counts = (len(held), max(live_counts(held)), sent[stage])
        lengths = (timing.busy[stage], timing.idle[stage], timing.waiting[stage])
        shown.add_row(str(stage), chunks, *map(str, counts), *(f"{length:.6g}" for length in lengths))
    forward, backward_input, backward_weight = args.times
    ended = (
        f"makespan {timing.makespan:.6g}, bubble {100 * timing.bubble_share:.1f} % of it, where a chunk takes "
        f"{forward:g} forward, {backward_input:g} for gradients of its input, {backward_weight:g} for those of its "
        f"parameters, and a message {args.transfer:g}. kept: the most forward passes that wait for their backward "
        "passes. idle: of the makespan; waiting: between the stage's first task and its last."
    )
    print_parts([Text(head), Text(proved), shown, Text(ended)])


def _as_json(timing: PipelineTiming, programs: Programs) -> dict[str, Any]:
    table = timing.table
    sent = _sent(programs)
    return {
        "schedule": table.name,
        "micro_batches": table.micro_batches,
        "placement": list(table.placement),
        "makespan": timing.makespan,
        "bubble_share": timing.bubble_share,
        "overhead": timing.overhead,
        "stages": [
            {
                "tasks": len(held),
                "most_live": max(live_counts(held)),
                "sent": sent[stage],
                "busy": timing.busy[stage],
                "idle": timing.idle[stage],
                "waiting": timing.waiting[stage],
            }
            for stage, held in enumerate(table.tasks)
        ],
    }
