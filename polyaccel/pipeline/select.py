"""The table that a training asks for: a published schedule by its name, or a file of its user's."""

from __future__ import annotations

from pathlib import Path

from polyaccel.pipeline.csv_schedule import read_table
from polyaccel.pipeline.schedules import SCHEDULES, make_table
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable, PipelineTask


def is_file(schedule: str) -> bool:
    """Whether `schedule` is the path of a CSV file, and no published name."""
    return schedule not in SCHEDULES and Path(schedule).suffix.lower() == ".csv"


def select_schedule(schedule: str, stages: int, micro_batches: int, chunks: int | None = None) -> PipelineTable:
    """Return the training table of `stages`; `chunks` a stage (None: as needed). Raises PipelineError."""
    table = _of_file(schedule, stages, chunks) if is_file(schedule) else None
    if table is None:
        table = make_table(schedule, stages, micro_batches, chunks)
    elif table.micro_batches != micro_batches:
        raise PipelineError(
            f"{schedule} is a table of {table.micro_batches} micro-batches, and a step has {micro_batches}",
            hint="make gradient_accumulation_steps the same number, or write another table",
            value=table.micro_batches,
        )
    if not table.trains:
        raise PipelineError(
            f"{schedule} has no backward passes, and cannot train", hint="use another schedule", value=schedule
        )
    return table


def evaluation_table(schedule: str, stages: int, micro_batches: int, chunks: int | None = None) -> PipelineTable:
    """Return the table by which `stages` evaluate so many micro-batches."""
    table = _of_file(schedule, stages, chunks) if is_file(schedule) else None
    if table is None:
        return make_table(schedule, stages, micro_batches, chunks).forwards()
    if table.micro_batches == micro_batches:
        return table.forwards()
    tasks = tuple(
        tuple(
            PipelineTask(PipelineOp.FORWARD, micro_batch, chunk)
            for micro_batch in range(micro_batches)
            for chunk, at in enumerate(table.placement)
            if at == stage
        )
        for stage in range(stages)
    )
    return PipelineTable(table.name, micro_batches, table.placement, tasks, (0,) * stages)


def chosen_placement(schedule: str, stages: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return each chunk's stage, for any number of micro-batches."""
    if is_file(schedule):
        return _of_file(schedule, stages, chunks).placement
    return make_table(schedule, stages, 1, chunks).placement


def _of_file(path: str, stages: int, chunks: int | None) -> PipelineTable:
    table = read_table(Path(path))
    if table.stages != stages:
        raise PipelineError(
            f"{path} is a table of {table.stages} stages, and there are {stages}",
            hint="use as many stages, or write another table",
            value=table.stages,
        )
    if chunks is not None and table.chunks != chunks * stages:
        raise PipelineError(
            f"{path} has {table.chunks} chunks, and {chunks} a stage are asked for",
            hint="leave the number of chunks out: the file has it",
            value=chunks,
        )
    return table
