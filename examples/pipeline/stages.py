"""What the stages of a pipeline did in a step, and when, beside what their table promises: one HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from polyaccel import comm
from polyaccel.pipeline.render import to_svg
from polyaccel.pipeline.table import PipelineOp, PipelineTable, PipelineTask
from polyaccel.pipeline.timing import OpTimes, PipelineTiming, simulate

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}svg{max-width:100%;height:auto}
td,th{padding:.15rem 1.5rem .15rem 0;text-align:right;font-variant-numeric:tabular-nums}
"""

Times = Sequence[tuple[int, int, int, float, float]]
"""Of each task of a stage: operation, micro-batch, chunk, begin and end in seconds."""


def measured_step(engine: Any, table: PipelineTable) -> PipelineTiming | None:
    """When every task of the engine's last batch began and ended, in ms from the first begin; of the stages with the
    first data rank. None on other ranks than 0. The clocks are those of one host. Collective."""
    place = engine.mesh.coordinates(comm.get_rank())
    own = [(*task, began, ended) for task, began, ended in engine.task_times] if not place["data"] else None
    told: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(told, (place["pipe"], own))
    if comm.get_rank() != 0:
        return None
    by_stage: dict[int, Times] = {stage: times for stage, times in told if times is not None}
    first = min(times[0][3] for times in by_stage.values())
    stages = [by_stage[stage] for stage in range(table.stages)]
    tasks = tuple(
        tuple(PipelineTask(PipelineOp(op), micro_batch, chunk) for op, micro_batch, chunk, _, _ in times)
        for times in stages
    )
    done = PipelineTable(f"{table.name}, measured, ms", table.micro_batches, table.placement, tasks, table.most_live)
    starts = [[(began - first) * 1e3 for *_, began, _ in times] for times in stages]
    ends = [[(ended - first) * 1e3 for *_, ended in times] for times in stages]
    return PipelineTiming(done, starts, ends)


def promised_step(measured: PipelineTiming, table: PipelineTable) -> PipelineTiming:
    """The same step as the table has it, if each task takes as long as its like took in the median."""
    found: dict[tuple[PipelineOp, int], list[float]] = defaultdict(list)
    for tasks, starts, ends in zip(measured.table.tasks, measured.starts, measured.ends, strict=True):
        for task, began, ended in zip(tasks, starts, ends, strict=True):
            found[task.op, task.chunk].append(ended - began)

    def times(op: PipelineOp) -> tuple[float, ...]:
        return tuple(median(found[op, chunk] or [0.0]) for chunk in range(table.chunks))

    inputs = times(PipelineOp.BACKWARD) if any(times(PipelineOp.BACKWARD)) else times(PipelineOp.BACKWARD_INPUT)
    return simulate(table, OpTimes(times(PipelineOp.FORWARD), inputs, times(PipelineOp.BACKWARD_WEIGHT)))


def write_report(
    file: Path, losses: Sequence[float], seconds: Sequence[float], measured: PipelineTiming, promised: PipelineTiming
) -> None:
    """`losses` and `seconds` by step; what was measured is the last step."""
    title = f"{promised.table.name}: {promised.table.stages} stages, {promised.table.micro_batches} micro-batches"
    figures = [("", "makespan, ms", "bubble", *(f"stage {stage} busy, ms" for stage in range(promised.table.stages)))]
    for name, timing in (("measured", measured), ("by the table", promised)):
        busy = (f"{busy:.1f}" for busy in timing.busy)
        figures.append((name, f"{timing.makespan:.1f}", f"{timing.bubble_share:.1%}", *busy))
    rows = [("step", "loss", "seconds")]
    rows += [
        (str(step), f"{loss:.4f}", f"{spent:.2f}")
        for step, (loss, spent) in enumerate(zip(losses, seconds, strict=True), start=1)
    ]
    parts = {
        "The last step as it was": to_svg(measured),
        "The same as the table has it, with the median time of each kind of task": to_svg(promised),
        "Figures": _table(figures),
        "Losses": _table(rows),
    }
    sections = "".join(f"<h2>{escape(name)}</h2>\n{body}\n" for name, body in parts.items())
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n<h1>{escape(title)}</h1>\n{sections}'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{page}</body></html>\n", encoding="utf-8")


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
