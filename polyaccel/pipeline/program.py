"""A stage's program as engines do it: which receives begin early, what is recorded for others, and when each task was
done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter, time
from typing import NamedTuple

from polyaccel.errors import CommError, CommTimeout
from polyaccel.pipeline.messages import StageMessage, StageReceive, StageStep
from polyaccel.pipeline.table import PipelineOp, PipelineTask


class TaskTime(NamedTuple):
    """When a stage did a task, in seconds of `time.perf_counter`, which ranks of a host share. On a device that works
    behind the host's back these are the times at which the host gave it its work."""

    task: PipelineTask
    began_s: float
    ended_s: float


def spans_of(times: Iterable[TaskTime]) -> Iterator[tuple[str, float, float]]:
    """The tasks of a step as a trace has them: name, begin and end in seconds of the wall clock."""
    shift_s = time() - perf_counter()
    for (op, micro_batch, chunk), began_s, ended_s in times:
        name = f"{PipelineOp(op).name.lower()} of micro-batch {micro_batch}, chunk {chunk}"
        yield name, began_s + shift_s, ended_s + shift_s


class ProgramStep(NamedTuple):
    """A step with what is recorded of it for others, and of a task the message, with its label, whose receive begins
    before it."""

    step: StageStep
    label: str
    begins: tuple[StageMessage, str] | None = None


def program_of(steps: Sequence[StageStep]) -> tuple[ProgramStep, ...]:
    """Steps as the engine does them. A message is recorded with its kind and with this stage's next task, or the one
    before, so the last message of a lost rank shows where it was. The receive behind a task begins before the task,
    unless it is of a gradient whose output is still to be made. See [Note: Global message order] of `messages`."""
    found: list[ProgramStep] = []
    after, coming = "then the end of the step", None  # what is done next, and what is received next
    for step in reversed(steps):
        if isinstance(step, PipelineTask):
            after = f"then {step}"
            begins = None if coming is None else (coming, f"{coming}, begun before {step}")
            found.append(ProgramStep(step, str(step), begins))
        else:
            label = f"{step.message}, {after}"
            found.append(ProgramStep(step, label))
            if isinstance(step, StageReceive):
                coming = step.message
    return _each_once(found[::-1])


def _each_once(program: Sequence[ProgramStep]) -> tuple[ProgramStep, ...]:
    """Each receive begins once, and when its length is there."""
    made: set[tuple[int, int]] = set()
    begun: set[StageMessage] = set()
    found = []
    for each in program:
        begins = each.begins
        if begins is not None:
            message = begins[0]
            is_known = message.op is PipelineOp.FORWARD or (message.micro_batch, message.chunk - 1) in made
            begins = begins if is_known and message not in begun else None
        if begins is not None:
            begun.add(begins[0])
        if isinstance(each.step, PipelineTask) and each.step.op is PipelineOp.FORWARD:
            made.add(each.step[1:])
        found.append(each._replace(begins=begins))
    return tuple(found)


def with_stages(error: CommError, at: str, stage: int, ranks: Sequence[int]) -> CommError:
    """`error` with what `stage` was `at`, and the stages that did not take part. `ranks` has the rank of each stage."""
    missing = {ranks.index(rank): rank for rank in error.missing_ranks if rank in ranks}
    named = ", ".join(f"stage {other} (rank {rank}) did not take part" for other, rank in sorted(missing.items()))
    message = f"stage {stage} of {len(ranks)} was at {at}{named and f'; {named}'}: {error.message}"
    kind = CommTimeout if isinstance(error, CommTimeout) else CommError
    return kind(message, missing_ranks=error.missing_ranks, hint=error.hint)
