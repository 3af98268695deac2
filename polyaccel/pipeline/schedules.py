"""The published schedules, each a function of numbers that makes a table.

[Note: Schedules of fewer micro-batches]
Some schedules are published for a number of micro-batches that the stages divide, or for many. A table of fewer
micro-batches is then the table of the next valid number with the others left out: every order that held between the
tasks that stay holds on, so the table is as right as before, and nothing is drawn twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polyaccel.pipeline.table import (
    PipelineError,
    PipelineOp,
    PipelineTable,
    PipelineTask,
    loop_placement,
    v_placement,
)

_FORWARD, _BACKWARD = PipelineOp.FORWARD, PipelineOp.BACKWARD
_INPUT, _WEIGHT = PipelineOp.BACKWARD_INPUT, PipelineOp.BACKWARD_WEIGHT


@dataclass(frozen=True)
class PipelineSchedule:
    """A way to make tables. `source` names the paper and its section; `tasks` gives the tasks of a stage from the
    numbers of stages and micro-batches, the chunks of a stage, and the stage; `most_live` the forward passes kept there
    at most, from the same. `chunks` is how many chunks a stage has, None where the user sets it."""

    name: str
    source: str
    tasks: Callable[[int, int, int, int], list[PipelineTask]]
    most_live: Callable[[int, int, int, int], int]
    chunks: int | None = 1
    is_v: bool = False
    whole_rounds: bool = False
    """Whether micro-batches are dealt in rounds of as many as there are stages."""
    fewest: Callable[[int], int] = lambda stages: 1
    """The fewest micro-batches for which the schedule is published, from the number of stages."""

    def table(self, stages: int, micro_batches: int, chunks: int) -> PipelineTable:
        """The table of `stages` with `chunks` each, by `make_table`, which checks the numbers."""
        made = max(micro_batches, self.fewest(stages))
        if self.whole_rounds:
            made += -made % stages
        placement = v_placement(stages) if self.is_v else loop_placement(stages, chunks)
        tasks = tuple(tuple(self.tasks(stages, made, chunks, stage)) for stage in range(stages))
        most = tuple(self.most_live(stages, made, chunks, stage) for stage in range(stages))
        table = PipelineTable(self.name, made, placement, tasks, most)
        # See [Note: Schedules of fewer micro-batches].
        return table if made == micro_batches else table.first(micro_batches)


def make_table(schedule: str, stages: int, micro_batches: int, chunks: int | None = None) -> PipelineTable:
    """Return a published schedule's table; `chunks` a stage (None: as needed). Raises PipelineError."""
    known = SCHEDULES.get(schedule)
    if known is None:
        names = ", ".join(SCHEDULES)
        raise PipelineError(f"no schedule is named {schedule!r}", hint=f"one of: {names}", value=schedule)
    for what, number in (("stages", stages), ("micro-batches", micro_batches), ("chunks", chunks)):
        if number is not None and number < 1:
            raise PipelineError(f"{number} {what} for {schedule}", hint="at least 1", value=number)
    if known.chunks is not None and chunks not in (None, known.chunks):
        needed = "one chunk" if known.chunks == 1 else f"{known.chunks} chunks"
        fitting = ", ".join(name for name, other in SCHEDULES.items() if other.chunks in (None, chunks))
        hint = "leave the number of chunks out" + (f", or use {fitting}" if fitting else "")
        raise PipelineError(f"{schedule} has {needed} a stage, not {chunks}", hint=hint, value=chunks)
    return known.table(stages, micro_batches, chunks or known.chunks or 2)


class _Tape:
    """The tasks of one stage as they are written: each call takes the next micro-batch of a chunk."""

    def __init__(self, *chunks: int) -> None:
        self.tasks: list[PipelineTask] = []
        self._chunks = chunks
        self._reached = {(op, chunk): 0 for op in PipelineOp for chunk in chunks}
        self._kept: deque[tuple[int, int]] = deque()
        """Micro-batch and chunk of what `input` left for `weight`, first come first."""

    def forward(self, which: int = 0) -> None:
        self._write(_FORWARD, self._chunks[which])

    def backward(self, which: int = 0) -> None:
        self._write(_BACKWARD, self._chunks[which])

    def input(self, which: int = 0) -> None:
        chunk = self._chunks[which]
        self._kept.append((self._next(chunk), chunk))
        self._write(_INPUT, chunk)

    def weight(self) -> None:
        """The parameters' gradients of the longest kept."""
        self.tasks.append(PipelineTask(_WEIGHT, *self._kept.popleft()))

    def weights(self) -> None:
        """Those of all that are kept."""
        while self._kept:
            self.weight()

    def forwards_done(self, which: int = 0) -> int:
        return self._reached[_FORWARD, self._chunks[which]]

    def backwards_done(self, which: int = 0) -> int:
        return self._next(self._chunks[which])

    def _next(self, chunk: int) -> int:
        return self._reached[_BACKWARD, chunk] + self._reached[_INPUT, chunk]

    def _write(self, op: PipelineOp, chunk: int) -> None:
        micro_batch = self._reached[op, chunk] if op is _FORWARD else self._next(chunk)
        self._reached[op, chunk] += 1
        self.tasks.append(PipelineTask(op, micro_batch, chunk))


def _gpipe(stages: int, micro_batches: int, chunks: int, stage: int) -> list[PipelineTask]:
    return [PipelineTask(op, index, stage) for op in (_FORWARD, _BACKWARD) for index in range(micro_batches)]


def _inference(stages: int, micro_batches: int, chunks: int, stage: int) -> list[PipelineTask]:
    """Round by round of as many micro-batches as there are stages, so that none waits for one behind it."""
    return [
        PipelineTask(_FORWARD, index, chunk * stages + stage)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for index in range(first, first + stages)
    ]


def _one_forward_one_backward(stages: int, micro_batches: int, chunks: int, stage: int) -> list[PipelineTask]:
    """Return the tasks of `stage` under 1F1B (PipeDream-Flush, Narayanan et al. 2021)."""
    tape = _Tape(stage)
    for _ in range(min(stages - stage - 1, micro_batches)):
        tape.forward()
    while tape.backwards_done() < micro_batches:
        if tape.forwards_done() < micro_batches:
            tape.forward()
        tape.backward()
    return tape.tasks


def _interleaved(stages: int, micro_batches: int, chunks: int, stage: int) -> list[PipelineTask]:
    """Order both passes in rounds of one micro-batch a stage, chunk after chunk, backward from the last."""
    order = [
        (first + index, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for index in range(stages)
    ]
    forwards = [PipelineTask(_FORWARD, index, chunk * stages + stage) for index, chunk in order]
    backwards = [PipelineTask(_BACKWARD, index, (chunks - 1 - chunk) * stages + stage) for index, chunk in order]
    ahead = min(_ahead(stages, chunks, stage), len(order))
    tasks = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        tasks += (forward, backward)
    return tasks + backwards[len(order) - ahead :]


def _ahead(stages: int, chunks: int, stage: int) -> int:
    """Forward passes of a stage before its first backward pass is due, one fewer than are done by then."""
    return (stages - stage - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * stages


def _zero_bubble_h1(stages: int, micro_batches: int, chunks: int, stage: int) -> list[PipelineTask]:
    """1F1B whose gradients of parameters come `stage` micro-batches late, where the stage would wait otherwise."""
    tape = _Tape(stage)
    for _ in range(min(stages - stage - 1, micro_batches)):
        tape.forward()
    while tape.backwards_done() < micro_batches:
        if tape.forwards_done() < micro_batches:
            tape.forward()
        tape.input()
        if tape.backwards_done() > stage:
            tape.weight()
    tape.weights()
    return tape.tasks


def _zero_bubble_v(stages: int, micro_batches: int, chunks: int, stage: int) -> list[PipelineTask]:
    """`down` is the chunk on the way down the stages, `up` the one on the way back."""
    tape, down, up = _Tape(stage, 2 * stages - 1 - stage), 0, 1
    for _ in range(2 * (stages - stage) - 1):
        tape.forward(down)
    for _ in range(stage):
        tape.forward(up)
        tape.forward(down)
    for _ in range(stages - stage):
        tape.forward(up)
        tape.input(up)
        tape.weight()
    while tape.forwards_done(up) < micro_batches:
        if tape.forwards_done(down) < micro_batches:
            tape.forward(down)
        tape.input(down)
        tape.weight()
        tape.forward(up)
        tape.input(up)
        tape.weight()
    for _ in range(stage):
        tape.input(down)
        tape.input(up)
    for _ in range(stages - stage):
        tape.input(down)
        tape.weight()
    tape.weights()
    return tape.tasks


def _dual_pipe_v(stages: int, micro_batches: int, chunks: int, stage: int) -> list[PipelineTask]:
    """A forward and a backward task that the authors run as one stand here one after the other."""
    tape, down, up = _Tape(stage, 2 * stages - 1 - stage), 0, 1
    after = stages - stage - 1
    for _ in range(2 * after):
        tape.forward(down)
    for _ in range(stage + 1):
        tape.forward(down)
        tape.forward(up)
    for _ in range(after):
        tape.input(up)
        tape.weight()
        tape.forward(up)
    for _ in range(micro_batches - 2 * stages + stage + 1):
        tape.forward(down)
        tape.backward(up)
        tape.forward(up)
        tape.backward(down)
    for _ in range(after):
        tape.backward(up)
        tape.forward(up)
        tape.backward(down)
    for index in range(2 * (stage + 1)):
        which = up if index % 2 == 0 else down
        (tape.backward if index <= stage else tape.input)(which)
    for _ in range(after):
        tape.weight()
        tape.input(down)
    tape.weights()
    return tape.tasks


def _live_of_loops(stages: int, micro_batches: int, chunks: int, stage: int) -> int:
    return min(_ahead(stages, chunks, stage) + 1, micro_batches * chunks)


SCHEDULES: Mapping[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule(
            "gpipe",
            "Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019, 2.3",
            _gpipe,
            lambda stages, micro_batches, chunks, stage: micro_batches,
        ),
        PipelineSchedule(
            "1f1b",
            "Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, 3.2 (PipeDream-Flush)",
            _one_forward_one_backward,
            _live_of_loops,
        ),
        PipelineSchedule(
            "interleaved",
            "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, 2.2.2",
            _interleaved,
            _live_of_loops,
            chunks=None,
            whole_rounds=True,
        ),
        PipelineSchedule(
            "zb-h1",
            "Qi et al., Zero Bubble Pipeline Parallelism, 2024, 2.1 (ZB-H1)",
            _zero_bubble_h1,
            lambda stages, micro_batches, chunks, stage: min(stages, micro_batches),
        ),
        PipelineSchedule(
            "zb-v",
            "Qi et al., Zero Bubble Pipeline Parallelism, 2024, 6 (ZB-V)",
            _zero_bubble_v,
            lambda stages, micro_batches, chunks, stage: 2 * stages,
            chunks=2,
            is_v=True,
            fewest=lambda stages: 2 * stages - 1,
        ),
        PipelineSchedule(
            "dualpipe-v",
            "DeepSeek-AI, DualPipe, 2025, section DualPipeV, after Qi et al., Pipeline Parallelism with Controllable "
            "Memory, 2024 (V-shaped placement)",
            _dual_pipe_v,
            lambda stages, micro_batches, chunks, stage: 2 * stages + 1,
            chunks=2,
            is_v=True,
            fewest=lambda stages: 2 * stages,
        ),
        PipelineSchedule(
            "inference",
            "Forward passes alone, in the order of the interleaved schedule's",
            _inference,
            lambda stages, micro_batches, chunks, stage: 0,
            chunks=None,
            whole_rounds=True,
        ),
    )
}
"""Every published schedule by its name."""
