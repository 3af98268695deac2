"""When each task of a table begins, if every stage does its tasks in order and waits for what they need.

This is the only place for what a task needs: the forward pass of a chunk the one of the chunk before it, the backward
pass the one of the chunk behind it and its own forward pass, the gradients of parameters those of the input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from polyaccel.pipeline.table import PipelineOp, PipelineTable, PipelineTask


@dataclass(frozen=True)
class Timeline:
    """`starts` and `ends` of the tasks that can be done, by stage and in order. `stuck` has the stages whose next task
    waits for ever: they have fewer of them than tasks."""

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: tuple[int, ...]


def dependencies(task: PipelineTask, chunks: int) -> tuple[PipelineTask, ...]:
    """Return what must precede `task` in `chunks`; BACKWARD_INPUT stands for BACKWARD too."""
    op, micro_batch, chunk = task
    if op is PipelineOp.FORWARD:
        return (PipelineTask(op, micro_batch, chunk - 1),) if chunk else ()
    if op is PipelineOp.BACKWARD_WEIGHT:
        return (PipelineTask(PipelineOp.BACKWARD_INPUT, micro_batch, chunk),)
    own = PipelineTask(PipelineOp.FORWARD, micro_batch, chunk)
    if chunk + 1 == chunks:
        return (own,)
    return own, PipelineTask(PipelineOp.BACKWARD_INPUT, micro_batch, chunk + 1)


def compute_timeline(table: PipelineTable, durations: Sequence[Sequence[float]], transfer: float = 0.0) -> Timeline:
    """Schedule tasks as early as possible; `durations[op][chunk]` and `transfer` in any one unit."""
    count = table.micro_batches
    gradients = table.chunks * count
    last = table.chunks - 1
    placement = table.placement
    arrived: list[float | None] = [None] * (2 * gradients)  # forward results, then gradients, when they are made
    waiting: dict[int, list[int]] = defaultdict(list)
    starts: list[list[float]] = [[] for _ in table.tasks]
    ends: list[list[float]] = [[] for _ in table.tasks]
    clocks = [0.0] * table.stages
    ready = list(range(table.stages))
    while ready:
        stage = ready.pop()
        tasks, began, ended, clock = table.tasks[stage], starts[stage], ends[stage], clocks[stage]
        for position in range(len(began), len(tasks)):
            op, micro_batch, chunk = tasks[position]
            own = chunk * count + micro_batch
            made = -1 if op == 3 else own if op == 0 else gradients + own
            here, far = -1, -1  # what is needed from this chunk, and from a neighbour
            if op == 0:
                far = own - count if chunk else -1
            elif op == 3:
                here = gradients + own
            else:
                here = own
                far = gradients + own + count if chunk < last else -1
            begin = clock
            if here >= 0:
                at = arrived[here]
                if at is None:
                    waiting[here].append(stage)
                    break
                begin = max(begin, at)
            if far >= 0:
                at = arrived[far]
                if at is None:
                    waiting[far].append(stage)
                    break
                if transfer and placement[chunk - 1 if op == 0 else chunk + 1] != stage:
                    at += transfer
                begin = max(begin, at)
            clock = begin + durations[op][chunk]
            began.append(begin)
            ended.append(clock)
            if made >= 0:
                arrived[made] = clock
                if made in waiting:
                    ready += waiting.pop(made)
        clocks[stage] = clock
    stuck = tuple(stage for stage, tasks in enumerate(table.tasks) if len(starts[stage]) < len(tasks))
    return Timeline(starts, ends, stuck)


UNIT_TIMES = ((1.0,), (2.0,), (1.0,), (1.0,))
"""How long each operation takes without measurements: the same for the three parts of a step."""


def unit_durations(chunks: int) -> list[list[float]]:
    """`UNIT_TIMES` for each of `chunks`."""
    return [[float(time)] * chunks for (time,) in UNIT_TIMES]
