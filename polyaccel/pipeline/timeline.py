"""When each task of a table begins, if every stage does its tasks in order and waits for what they need.

This is the only place for what a task needs: the forward pass of a chunk the one of the chunk before it, the backward
pass the one of the chunk behind it and its own forward pass, the gradients of parameters those of the input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable, PipelineTask

UNIT_TIMES = ((1.0,), (2.0,), (1.0,), (1.0,))
"""How long each operation takes without measurements: the same for the three parts of a step."""


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


def unit_durations(chunks: int) -> list[list[float]]:
    """`UNIT_TIMES` for each of `chunks`."""
    return [[float(time)] * chunks for (time,) in UNIT_TIMES]


@dataclass(frozen=True)
class OpTimes:
    """How long each chunk takes for its parts of a micro-batch, by chunk, and how long a message is under way between
    stages. BACKWARD takes the two parts of a backward pass together. Any unit, the same for all."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def even(
        cls,
        chunks: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
    ) -> OpTimes:
        """The times of `chunks` that are all the same."""
        return cls((forward,) * chunks, (backward_input,) * chunks, (backward_weight,) * chunks, transfer)

    @property
    def durations(self) -> tuple[Sequence[float], ...]:
        """By operation and chunk."""
        whole = [first + second for first, second in zip(self.backward_input, self.backward_weight, strict=True)]
        return self.forward, whole, self.backward_input, self.backward_weight


@dataclass(frozen=True)
class PipelineTiming:
    """When every task of `table` begins and ends, by stage and in order, in the unit of the times it was made from."""

    table: PipelineTable
    starts: list[list[float]]
    ends: list[list[float]]

    @property
    def makespan(self) -> float:
        """From the begin of the first task to the end of the last, over all stages."""
        return max(ends[-1] for ends in self.ends)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each stage computes."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(float(np.subtract(ends, starts).sum()) for starts, ends in pairs)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each stage does not compute, of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def waiting(self) -> tuple[float, ...]:
        """Return each stage's wait between its first and last task, idle even in back-to-back steps."""
        pairs = zip(self.starts, self.ends, self.busy, strict=True)
        return tuple(ends[-1] - starts[0] - busy for starts, ends, busy in pairs)

    @property
    def bubble_share(self) -> float:
        """Return the idle share of all stages: (p - 1) / (m + p - 1) for even 1F1B."""
        return sum(self.idle) / (self.makespan * self.table.stages)

    @property
    def overhead(self) -> float:
        """Return makespan over the busiest stage's work, less 1: (p - 1) / (m v) for even chunks."""
        return self.makespan / max(self.busy) - 1


def simulate(table: PipelineTable, times: OpTimes) -> PipelineTiming:
    """Simulate a checked table. Raises PipelineError for other numbers of chunks, and cycles."""
    if any(len(part) != table.chunks for part in times.durations):
        raise PipelineError(
            f"times of {[len(part) for part in times.durations]} chunks for a table of {table.chunks}",
            hint="give a time for each chunk",
            value=times,
        )
    walked = compute_timeline(table, times.durations, times.transfer)
    if walked.stuck:
        raise PipelineError(f"stages {list(walked.stuck)} of {table.name} wait for ever", hint="check_table shows why")
    return PipelineTiming(table, walked.starts, walked.ends)
