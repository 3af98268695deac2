"""Proof that a table can be run: every task once, data before use, messages matched, nothing that waits for ever.

`check_table` looks at the table, and then at the programs that are derived from it. It assumes nothing of who made
either: a user's own table and a published one pass the same checks. An error is about one task; its `value` is the
stage and the task's place there.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyaccel.pipeline.messages import (
    Programs,
    StageMessage,
    StageReceive,
    StageSend,
    StageStep,
    message_of,
    programs_of,
)
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable, PipelineTask, live_counts
from polyaccel.pipeline.timeline import compute_timeline, dependencies, unit_durations

_BACKWARDS = (PipelineOp.BACKWARD, PipelineOp.BACKWARD_INPUT)


def check_table(table: PipelineTable) -> Programs:
    """The programs of a table that can be run. Raises PipelineError for the first thing that is wrong with it."""
    _check_places(table)
    _check_counts(table)
    _check_own_order(table)
    _check_waits(table)
    _check_live(table)
    programs = programs_of(table)
    check_programs(programs, table.placement)
    return programs


def _at(stage: int, position: int, task: StageStep) -> str:
    return f"stage {stage}, step {position}, {task}"


def _check_places(table: PipelineTable) -> None:
    """Every task names a micro-batch that there is and a chunk that its stage holds."""
    for chunk, stage in enumerate(table.placement):
        if not 0 <= stage < table.stages:
            raise PipelineError(f"chunk {chunk} is placed on stage {stage}, and there are {table.stages} stages")
    for stage, tasks in enumerate(table.tasks):
        for position, task in enumerate(tasks):
            problem = ""
            if not 0 <= task.micro_batch < table.micro_batches:
                problem = f"there are micro-batches 0 to {table.micro_batches - 1}"
            elif not 0 <= task.chunk < table.chunks:
                problem = f"there are chunks 0 to {table.chunks - 1}"
            elif table.placement[task.chunk] != stage:
                problem = f"chunk {task.chunk} is on stage {table.placement[task.chunk]}"
            if problem:
                raise PipelineError(f"{_at(stage, position, task)}: {problem}", value=(stage, position))


def _check_counts(table: PipelineTable) -> None:
    """Every task once. What has a backward pass has all of it: in one, or gradients of input and of parameters."""
    seen: set[PipelineTask] = set()
    for stage, tasks in enumerate(table.tasks):
        for position, task in enumerate(tasks):
            if task in seen:
                first = tasks.index(task)
                raise PipelineError(
                    f"{_at(stage, position, task)}: it is done twice, first at step {first}", value=(stage, position)
                )
            seen.add(task)
    trains = table.trains
    for chunk, stage in enumerate(table.placement):
        for micro_batch in range(table.micro_batches):
            done = [PipelineTask(op, micro_batch, chunk) in seen for op in PipelineOp]
            if not done[PipelineOp.FORWARD]:
                raise _missing(PipelineOp.FORWARD, stage, micro_batch, chunk)
            if not trains:
                continue
            whole, *parts = done[PipelineOp.BACKWARD :]
            if whole and any(parts):
                twice = next(op for op in PipelineOp if op > PipelineOp.BACKWARD and done[op])
                task = PipelineTask(twice, micro_batch, chunk)
                position = table.tasks[stage].index(task)
                raise PipelineError(
                    f"{_at(stage, position, task)}: BACKWARD of it is done too, which has both gradients",
                    value=(stage, position),
                )
            if not whole and not any(parts):
                raise _missing(PipelineOp.BACKWARD, stage, micro_batch, chunk)
            if not whole and not all(parts):
                raise _missing(PipelineOp(done.index(False, PipelineOp.BACKWARD_INPUT)), stage, micro_batch, chunk)


def _missing(op: PipelineOp, stage: int, micro_batch: int, chunk: int) -> PipelineError:
    task = PipelineTask(op, micro_batch, chunk)
    return PipelineError(f"stage {stage} never does {task}", hint="each stage does each once", value=(stage, None))


def _check_own_order(table: PipelineTable) -> None:
    """A stage does what its own task needs chunk before the task."""
    for stage, tasks in enumerate(table.tasks):
        done: set[tuple[bool, int, int]] = set()  # whether backward, micro-batch, chunk
        for position, (op, micro_batch, chunk) in enumerate(tasks):
            if op is not PipelineOp.FORWARD and (op is PipelineOp.BACKWARD_WEIGHT, micro_batch, chunk) not in done:
                needed = PipelineOp.BACKWARD_INPUT if op is PipelineOp.BACKWARD_WEIGHT else PipelineOp.FORWARD
                raise PipelineError(
                    f"{_at(stage, position, tasks[position])}: {needed.name} of it comes only later",
                    hint="a forward pass comes before its backward pass, and gradients of inputs before those of "
                    "parameters",
                    value=(stage, position),
                )
            if op is PipelineOp.FORWARD or op in _BACKWARDS:
                done.add((op is not PipelineOp.FORWARD, micro_batch, chunk))


def _check_waits(table: PipelineTable) -> None:
    """No circle of stages, each of which waits for what the next does only after it has waited too."""
    walked = compute_timeline(table, unit_durations(table.chunks))
    if not walked.stuck:
        return
    stage, described, seen = walked.stuck[0], [], []
    while stage not in seen:
        seen.append(stage)
        task = table.tasks[stage][len(walked.starts[stage])]
        done = {other for at, starts in enumerate(walked.starts) for other in table.tasks[at][: len(starts)]}
        need = next(need for need in dependencies(task, table.chunks) if not _is_done(need, done))
        described.append(
            f"{_at(stage, len(walked.starts[stage]), task)}, waits for stage {table.placement[need.chunk]}"
        )
        stage = table.placement[need.chunk]
    circle = described[seen.index(stage) :]
    raise PipelineError(
        f"these wait for each other for ever: {'; '.join(circle)}",
        hint="a forward pass needs that of the chunk before it, a backward pass that of the chunk behind it: do what "
        "others wait for first",
        value=(stage, len(walked.starts[stage])),
    )


def _is_done(need: PipelineTask, done: set[PipelineTask]) -> bool:
    return need in done or (need.op is PipelineOp.BACKWARD_INPUT and need._replace(op=PipelineOp.BACKWARD) in done)


def _check_live(table: PipelineTable) -> None:
    for stage, tasks in enumerate(table.tasks):
        for position, live in enumerate(live_counts(tasks)):
            if live > table.most_live[stage]:
                raise PipelineError(
                    f"{_at(stage, position, tasks[position])}: the stage then keeps {live} forward passes for their "
                    f"backward passes, and {table.most_live[stage]} is the most that {table.name} promises",
                    value=(stage, position),
                )


def check_programs(programs: Programs, placement: Sequence[int]) -> None:
    """Run programs with rendezvous sends. Raises PipelineError for messages out of order, and deadlocks."""
    _check_messages(programs, tuple(placement))
    reached = [0] * len(programs)
    blocked: dict[int, StageSend | StageReceive] = {}
    ready = list(range(len(programs)))
    while ready:
        stage = ready.pop()
        program = programs[stage]
        while reached[stage] < len(program):
            step = program[reached[stage]]
            if isinstance(step, PipelineTask):
                reached[stage] += 1
                continue
            peer = _peer(step)
            other = blocked.get(peer)
            if other is None or _peer(other) != stage or type(other) is type(step):
                blocked[stage] = step
                break
            if other.message != step.message:
                raise PipelineError(
                    f"stage {stage}, step {reached[stage]}: {_described(step)}, while stage {peer}, step "
                    f"{reached[peer]}: {_described(other)}",
                    hint="both sides have the messages between them in one order",
                    value=step,
                )
            del blocked[peer]
            reached[peer] += 1
            reached[stage] += 1
            ready.append(peer)
    if blocked:
        described = "; ".join(
            f"stage {stage}, step {reached[stage]}: {_described(step)}" for stage, step in blocked.items()
        )
        stage = next(iter(blocked))
        raise PipelineError(f"these wait for ever: {described}", value=blocked[stage])


def _check_messages(programs: Programs, placement: tuple[int, ...]) -> None:
    """Messages are sent by those who made them, after that, and there before they are needed."""
    for stage, program in enumerate(programs):
        made: set[StageMessage] = set()
        there: set[tuple[PipelineOp, int, int]] = set()
        for position, step in enumerate(program):
            if isinstance(step, StageReceive):
                there.add(step.message[:3])
            elif isinstance(step, StageSend):
                if step.message not in made:
                    raise PipelineError(
                        f"stage {stage}, step {position}: {_described(step)}, which it has not made",
                        value=step,
                    )
            else:
                for need in dependencies(step, len(placement)):
                    if placement[need.chunk] != stage and need not in there:
                        raise PipelineError(f"{_at(stage, position, step)}: nothing has come from {need}", value=step)
                message = message_of(step, placement)
                if message is not None:
                    made.add(message)


def _peer(step: StageSend | StageReceive) -> int:
    return step.message.target if isinstance(step, StageSend) else step.message.source


def _described(step: StageSend | StageReceive) -> str:
    if isinstance(step, StageSend):
        return f"it sends stage {step.message.target} the {step.message}"
    return f"it expects of stage {step.message.source} the {step.message}"
