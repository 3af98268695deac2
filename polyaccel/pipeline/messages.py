"""What stages send each other, derived from a table: the table's tasks with sends and receives between them.

[Note: Global message order]
All tasks and messages stand in one order over all stages: that of the time at which a task begins, or a message is
there, if every operation takes as long as in `UNIT_TIMES`. A stage's program is that order without what concerns other
stages, so two stages have the messages between them in the same order. And nothing can wait for ever, even where a
send ends only when its receive has begun: of all that is still to do, both sides of the first have everything before it
behind them. A backend that sends in the background may begin a receive earlier than in its program, as long as those
from one stage stay in order.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from polyaccel.pipeline.table import PipelineOp, PipelineTable, PipelineTask
from polyaccel.pipeline.timeline import compute_timeline, unit_durations


class StageMessage(NamedTuple):
    """What a task on stage `source` made for stage `target`: an output (FORWARD) or the gradient of an input
    (BACKWARD_INPUT, whether it was made by this or by BACKWARD). `chunk` is the chunk that made it."""

    op: PipelineOp
    micro_batch: int
    chunk: int
    source: int
    target: int

    def __str__(self) -> str:
        what = "output" if self.op is PipelineOp.FORWARD else "gradient"
        return f"{what} of micro-batch {self.micro_batch} from chunk {self.chunk}"


class StageSend(NamedTuple):
    """A stage sends a message."""

    message: StageMessage


class StageReceive(NamedTuple):
    """A stage receives a message."""

    message: StageMessage


StageStep = PipelineTask | StageSend | StageReceive
"""What a stage's program is made of."""

Programs = tuple[tuple[StageStep, ...], ...]
"""The steps of every stage, in order."""


def message_of(task: PipelineTask, placement: tuple[int, ...]) -> StageMessage | None:
    """What `task` makes for another stage; None where the next chunk stands on the same stage, or nothing needs it."""
    op, micro_batch, chunk = task
    if op is PipelineOp.BACKWARD_WEIGHT:
        return None
    forward = op is PipelineOp.FORWARD
    other = chunk + 1 if forward else chunk - 1
    if not 0 <= other < len(placement) or placement[other] == placement[chunk]:
        return None
    kind = PipelineOp.FORWARD if forward else PipelineOp.BACKWARD_INPUT
    return StageMessage(kind, micro_batch, chunk, placement[chunk], placement[other])


def programs_of(table: PipelineTable) -> Programs:
    """The programs of all stages of a table that `check_table` accepts, see [Note: Global message order]."""
    walked = compute_timeline(table, unit_durations(table.chunks))
    events: list[tuple[float, int, int, int, PipelineTask | StageMessage]] = []  # time, 1 for a task, stage, position
    for stage, tasks in enumerate(table.tasks):
        for position, (task, begin, end) in enumerate(
            zip(tasks, walked.starts[stage], walked.ends[stage], strict=True)
        ):
            events.append((begin, 1, stage, position, task))
            message = message_of(task, table.placement)
            if message is not None:
                events.append((end, 0, stage, position, message))
    events.sort(key=itemgetter(0, 1, 2, 3))
    programs: list[list[StageStep]] = [[] for _ in table.tasks]
    for _, _, stage, _, event in events:
        if isinstance(event, PipelineTask):
            programs[stage].append(event)
        else:
            programs[stage].append(StageSend(event))
            programs[event.target].append(StageReceive(event))
    return tuple(map(tuple, programs))
