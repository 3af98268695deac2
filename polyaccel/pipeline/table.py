"""A pipeline's table: which stage does which operation for which micro-batch and which chunk of the model, in order.

A *stage* is a place in the pipeline: the ranks there hold the same layers. The model is cut into *chunks*, numbered in
the order in which a micro-batch passes them; a stage holds one or several. A *task* is one operation on one micro-batch
and one chunk. A table has the tasks of every stage in the order in which the stage does them. What stages send each
other is not a part of a table: `polyaccel.pipeline.messages` derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from polyaccel.errors import PolyaccelError


class PipelineError(PolyaccelError, ValueError):
    """A pipeline's table cannot be made or cannot be run. The message names stage, operation and micro-batch, or the
    file and line."""


class PipelineOp(IntEnum):
    """An operation of a task."""

    FORWARD = 0
    """From a chunk's input to its output, with what the backward pass needs kept."""
    BACKWARD = 1
    """The gradients of the chunk's input and of its parameters, in one."""
    BACKWARD_INPUT = 2
    """The gradient of the chunk's input alone; what `BACKWARD_WEIGHT` needs stays."""
    BACKWARD_WEIGHT = 3
    """The gradients of the chunk's parameters, after `BACKWARD_INPUT` of the same micro-batch."""


class PipelineTask(NamedTuple):
    """One operation on one micro-batch and one chunk."""

    op: PipelineOp
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.op.name} of micro-batch {self.micro_batch} in chunk {self.chunk}"


@dataclass(frozen=True)
class PipelineTable:
    """The tasks of every stage, in order.

    `placement` has the stage of each chunk; `tasks` the tasks of each stage. `most_live` has for each stage how many
    forward passes it keeps at most for their backward passes, counted as pairs of micro-batch and chunk. Nothing of
    this is checked here: `check_table` does.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]
    tasks: tuple[tuple[PipelineTask, ...], ...]
    most_live: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.tasks)

    @property
    def chunks(self) -> int:
        """The chunks of the whole model."""
        return len(self.placement)

    @property
    def trains(self) -> bool:
        """Whether any task is of a backward pass."""
        return any(task.op is not PipelineOp.FORWARD for tasks in self.tasks for task in tasks)

    def forwards(self) -> PipelineTable:
        """The table of its forward passes alone, in their order, which keeps nothing."""
        tasks = tuple(tuple(task for task in stage if task.op is PipelineOp.FORWARD) for stage in self.tasks)
        return PipelineTable(self.name, self.micro_batches, self.placement, tasks, (0,) * self.stages)

    def first(self, micro_batches: int) -> PipelineTable:
        """The table of the first `micro_batches` alone, the others left out. What was in order stays in order."""
        tasks = tuple(tuple(task for task in stage if task.micro_batch < micro_batches) for stage in self.tasks)
        most = tuple(min(live, micro_batches * self.placement.count(at)) for at, live in enumerate(self.most_live))
        return PipelineTable(self.name, micro_batches, self.placement, tasks, most)


def live_counts(tasks: Sequence[PipelineTask]) -> list[int]:
    """Count forward passes kept for backward after each of a stage's tasks; none without backward."""
    if all(task.op is PipelineOp.FORWARD for task in tasks):
        return [0] * len(tasks)
    counts, live = [], 0
    for task in tasks:
        if task.op is PipelineOp.FORWARD:
            live += 1
        elif task.op is not PipelineOp.BACKWARD_INPUT:
            live -= 1
        counts.append(live)
    return counts


def loop_placement(stages: int, rounds: int = 1) -> tuple[int, ...]:
    """Chunks dealt to stages `rounds` times in order: 0, 1, 2, 0, 1, 2."""
    return tuple(range(stages)) * rounds


def v_placement(stages: int) -> tuple[int, ...]:
    """Chunks down the stages and up again: 0, 1, 2, 2, 1, 0. The first stage has the first chunk and the last."""
    return (*range(stages), *reversed(range(stages)))
