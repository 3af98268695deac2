"""A user's own table as a CSV file, and any table as a CSV file."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable, PipelineTask, live_counts

COLUMNS = ("slot", "stage", "op", "micro_batch", "chunk")
"""`slot` orders the rows of a stage; `op` is a name of `PipelineOp`; all others are numbers from 0."""


def write_table(table: PipelineTable) -> str:
    """The text of a CSV file that `read_table` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for stage, tasks in enumerate(table.tasks):
        writer.writerows((slot, stage, task.op.name, task.micro_batch, task.chunk) for slot, task in enumerate(tasks))
    return text.getvalue()


def read_table(path: Path) -> PipelineTable:
    """Read and check a file's table; sizes follow from its rows. Raises PipelineError with the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{path} cannot be read: {error}", hint="give a CSV file of a table", value=path) from error
    rows = csv.reader(io.StringIO(text))
    head = tuple(name.strip() for name in next(rows, []))
    if head != COLUMNS:
        raise PipelineError(
            f"{path}:1: its columns are {','.join(head)}", hint=f"write {','.join(COLUMNS)}", value=path
        )
    found: dict[int, list[tuple[int, int, PipelineTask]]] = defaultdict(list)  # by stage: slot, line, task
    placement: dict[int, int] = {}
    for row in rows:
        if row:
            slot, stage, task = _parsed(row, f"{path}:{rows.line_num}")
            found[stage].append((slot, rows.line_num, task))
            if placement.setdefault(task.chunk, stage) != stage:
                raise PipelineError(
                    f"{path}:{rows.line_num}: stage {stage} does {task}, and that chunk is on stage "
                    f"{placement[task.chunk]} in lines before",
                    hint="all tasks of a chunk are on one stage",
                    value=task,
                )
    return _checked(path, found, placement)


def _parsed(row: list[str], where: str) -> tuple[int, int, PipelineTask]:
    """Slot, stage and task of a line."""
    if len(row) != len(COLUMNS):
        raise PipelineError(f"{where}: {len(row)} values", hint=f"write {','.join(COLUMNS)}", value=row)
    named = dict(zip(COLUMNS, (text.strip() for text in row), strict=True))
    op = named.pop("op")
    if op not in PipelineOp.__members__:
        raise PipelineError(
            f"{where}: no op is named {op!r}", hint=f"one of: {', '.join(PipelineOp.__members__)}", value=op
        )
    for name, text in named.items():
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise PipelineError(f"{where}: {name} is {text!r}", hint="write a number from 0", value=text)
    task = PipelineTask(PipelineOp[op], int(named["micro_batch"]), int(named["chunk"]))
    return int(named["slot"]), int(named["stage"]), task


def _checked(
    path: Path, found: dict[int, list[tuple[int, int, PipelineTask]]], placement: dict[int, int]
) -> PipelineTable:
    for what, numbers in (("stage", found), ("chunk", placement)):
        absent = next((number for number in range(max(numbers, default=0) + 1) if number not in numbers), None)
        if absent is not None:
            raise PipelineError(f"{path}: no row is of {what} {absent}", hint="number them from 0", value=absent)
    for stage, rows in found.items():
        rows.sort(key=lambda row: row[0])
        for (before, line, _), (slot, later, task) in pairwise(rows):
            if before == slot:
                raise PipelineError(
                    f"{path}:{later}: stage {stage} does {task} in slot {slot}, which line {line} has too",
                    hint="a stage does one task at a time",
                    value=slot,
                )
    tasks = tuple(tuple(task for _, _, task in found[stage]) for stage in range(len(found)))
    micro_batches = 1 + max(task.micro_batch for stage in tasks for task in stage)
    table = PipelineTable(
        name=path.name,
        micro_batches=micro_batches,
        placement=tuple(placement[chunk] for chunk in range(len(placement))),
        tasks=tasks,
        most_live=tuple(max(live_counts(stage)) for stage in tasks),
    )
    try:
        check_table(table)
    except PipelineError as error:
        where = _line(found, error.value)
        raise PipelineError(f"{path}{where}: {error.message}", hint=error.hint, value=error.value) from None
    return table


def _line(found: dict[int, list[tuple[int, int, PipelineTask]]], value: object) -> str:
    """The line of the task that an error of `check_table` names by stage and place; "" where it names none."""
    match value:
        case (int(stage), int(position)):
            return f":{found[stage][position][1]}"
    return ""
