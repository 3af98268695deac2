"""The checker refuses tables and programs that cannot be run, and says which stage, operation and micro-batch."""

from __future__ import annotations

import re
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyaccel.pipeline.check import check_programs, check_table
from polyaccel.pipeline.messages import Programs, StageReceive, StageSend, programs_of
from polyaccel.pipeline.schedules import SCHEDULES, make_table
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable, PipelineTask

F, B, BI, W = PipelineOp

tables = st.builds(
    make_table, st.sampled_from(sorted(set(SCHEDULES) - {"inference"})), st.integers(1, 4), st.integers(1, 6)
)


def with_stage(table: PipelineTable, stage: int, tasks: list[PipelineTask]) -> PipelineTable:
    """The table with other tasks on a stage, and nothing promised of what is kept."""
    stages = (*table.tasks[:stage], tuple(tasks), *table.tasks[stage + 1 :])
    return replace(table, tasks=stages, most_live=(10**6,) * table.stages)


def named(task: PipelineTask, stage: int) -> str:
    return rf"stage {stage}\b.*{task.op.name} of micro-batch {task.micro_batch} in chunk {task.chunk}"


def drawn(data: st.DataObject, table: PipelineTable) -> tuple[int, int]:
    """A stage and the place of one of its tasks."""
    stage = data.draw(st.integers(0, table.stages - 1))
    return stage, data.draw(st.integers(0, len(table.tasks[stage]) - 1))


def can_be_run(table: PipelineTable) -> bool:
    """Whether the tasks of a table that has each once have any order: the oracle, which shares nothing with ours."""
    last = table.chunks - 1
    gradient = {(t.micro_batch, t.chunk): t for tasks in table.tasks for t in tasks if t.op in (B, BI)}
    graph: TopologicalSorter[PipelineTask] = TopologicalSorter()
    for tasks in table.tasks:
        for index, task in enumerate(tasks):
            _, micro_batch, chunk = task
            graph.add(task, *tasks[max(0, index - 1) : index])
            if task.op is F and chunk:
                graph.add(task, PipelineTask(F, micro_batch, chunk - 1))
            if task.op in (B, BI):
                graph.add(task, PipelineTask(F, micro_batch, chunk))
                if chunk < last:
                    graph.add(task, gradient[micro_batch, chunk + 1])
            if task.op is W:
                graph.add(task, PipelineTask(BI, micro_batch, chunk))
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


@settings(max_examples=40)
@given(tables, st.data())
def test_a_task_that_is_left_out_is_named(table: PipelineTable, data: st.DataObject) -> None:
    stage, position = drawn(data, table)
    tasks = list(table.tasks[stage])
    gone = tasks.pop(position)
    broken = with_stage(table, stage, tasks)
    assume(broken.trains)  # one forward pass alone is a table
    if gone.op in (BI, W) and PipelineTask(W if gone.op is BI else BI, *gone[1:]) in tasks:
        said = named(gone, stage)
    else:  # nothing says whether BACKWARD or its two parts are missing
        said = named(gone if gone.op is F else gone._replace(op=B), stage)
    with pytest.raises(PipelineError) as caught:
        check_table(broken)
    assert re.search(said, str(caught.value))


@settings(max_examples=40)
@given(tables, st.data())
def test_a_task_that_is_done_twice_is_named(table: PipelineTable, data: st.DataObject) -> None:
    stage, position = drawn(data, table)
    tasks = list(table.tasks[stage])
    tasks.insert(data.draw(st.integers(0, len(tasks))), tasks[position])
    with pytest.raises(PipelineError) as caught:
        check_table(with_stage(table, stage, tasks))
    assert re.search(named(table.tasks[stage][position], stage), str(caught.value))


@settings(max_examples=40)
@given(tables.filter(lambda table: table.stages > 1), st.data())
def test_a_task_on_another_stage_is_named(table: PipelineTable, data: st.DataObject) -> None:
    stage, position = drawn(data, table)
    other = data.draw(st.integers(0, table.stages - 1).filter(lambda at: at != stage))
    tasks = list(table.tasks[stage])
    moved = tasks.pop(position)
    theirs = list(table.tasks[other])
    theirs.insert(data.draw(st.integers(0, len(theirs))), moved)
    with pytest.raises(PipelineError) as caught:
        check_table(with_stage(with_stage(table, stage, tasks), other, theirs))
    assert re.search(named(moved, other), str(caught.value))


@settings(max_examples=150)
@given(tables, st.data())
def test_what_two_swapped_tasks_make_of_a_table_is_known(table: PipelineTable, data: st.DataObject) -> None:
    stage, one = drawn(data, table)
    other = data.draw(st.integers(0, len(table.tasks[stage]) - 1))
    assume(one != other)
    tasks = list(table.tasks[stage])
    tasks[one], tasks[other] = tasks[other], tasks[one]
    swapped = with_stage(table, stage, tasks)
    if can_be_run(swapped):
        check_table(swapped)
        return
    with pytest.raises(PipelineError) as caught:
        check_table(swapped)
    at, position = caught.value.value
    assert re.search(named(swapped.tasks[at][position], at), str(caught.value))


@settings(max_examples=40)
@given(tables, st.data())
def test_a_backward_pass_before_its_forward_pass_is_named(table: PipelineTable, data: st.DataObject) -> None:
    stage, _ = drawn(data, table)
    task = data.draw(st.sampled_from([task for task in table.tasks[stage] if task.op is not F]))
    needed = F if task.op is not W else BI
    tasks = list(table.tasks[stage])
    before, after = tasks.index(task._replace(op=needed)), tasks.index(task)
    tasks[before], tasks[after] = tasks[after], tasks[before]
    with pytest.raises(PipelineError) as caught:
        check_table(with_stage(table, stage, tasks))
    assert all(part in str(caught.value) for part in (str(stage), str(before), str(task.micro_batch)))


def test_stages_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    table = PipelineTable(
        "mine",
        micro_batches=2,
        placement=(0, 1),
        tasks=(
            (PipelineTask(F, 0, 0), PipelineTask(B, 0, 0), PipelineTask(F, 1, 0), PipelineTask(B, 1, 0)),
            (PipelineTask(F, 0, 1), PipelineTask(F, 1, 1), PipelineTask(B, 0, 1), PipelineTask(B, 1, 1)),
        ),
        most_live=(2, 2),
    )
    with pytest.raises(PipelineError) as caught:
        check_table(table)
    text = caught.value.message
    assert "stage 0, step 1, BACKWARD of micro-batch 0 in chunk 0, waits for stage 1" in text
    assert "stage 1, step 1, FORWARD of micro-batch 1 in chunk 1, waits for stage 0" in text


def test_more_that_is_kept_than_was_promised_is_named() -> None:
    table = replace(make_table("gpipe", 2, 4), most_live=(4, 3))
    with pytest.raises(PipelineError) as caught:
        check_table(table)
    assert caught.value.value == (1, 3)
    assert all(part in str(caught.value) for part in ("FORWARD", "stage 1", "step 3", "micro-batch 3"))


def test_a_backward_pass_whole_and_in_parts_is_refused() -> None:
    table = make_table("1f1b", 1, 1)
    tasks = [*table.tasks[0], PipelineTask(W, 0, 0)]
    with pytest.raises(PipelineError) as caught:
        check_table(with_stage(table, 0, tasks))
    assert caught.value.value == (0, 2)
    assert all(part in str(caught.value) for part in ("BACKWARD_WEIGHT", "micro-batch 0"))
    with pytest.raises(PipelineError) as caught:
        check_table(with_stage(table, 0, [PipelineTask(F, 0, 0), PipelineTask(BI, 0, 0)]))
    assert caught.value.value == (0, None)
    assert all(part in str(caught.value) for part in ("BACKWARD_WEIGHT", "stage 0", "micro-batch 0"))


@pytest.mark.parametrize(
    "task",
    [PipelineTask(F, 4, 0), PipelineTask(F, 0, 2), PipelineTask(F, -1, 0)],
)
def test_a_task_outside_of_the_table_is_refused(task: PipelineTask) -> None:
    table = make_table("1f1b", 2, 2)
    with pytest.raises(PipelineError) as caught:
        check_table(with_stage(table, 0, [*table.tasks[0], task]))
    assert re.search(named(task, 0), str(caught.value))


def test_a_chunk_on_no_stage_is_refused() -> None:
    with pytest.raises(PipelineError) as caught:
        check_table(replace(make_table("1f1b", 2, 2), placement=(0, 2)))
    assert "stage 2" in str(caught.value)


PROGRAMS = programs_of(make_table("1f1b", 3, 4))
PLACEMENT = (0, 1, 2)


def changed(stage: int, steps: list[object]) -> Programs:
    return (*PROGRAMS[:stage], tuple(steps), *PROGRAMS[stage + 1 :])  # type: ignore[arg-type]


def of_kind(kind: type, stage: int) -> list[int]:
    return [position for position, step in enumerate(PROGRAMS[stage]) if isinstance(step, kind)]


def test_programs_as_they_are_derived_can_be_run() -> None:
    check_programs(PROGRAMS, PLACEMENT)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("kind", [StageSend, StageReceive])
def test_a_message_that_one_side_leaves_out_is_refused(kind: type, stage: int) -> None:
    for position in of_kind(kind, stage):
        steps = list(PROGRAMS[stage])
        del steps[position]
        with pytest.raises(PipelineError) as caught:
            check_programs(changed(stage, steps), PLACEMENT)
        assert isinstance(caught.value.value, StageSend | StageReceive | PipelineTask)


@pytest.mark.parametrize("stage", [0, 1])
def test_messages_in_another_order_on_one_side_are_refused(stage: int) -> None:
    steps = list(PROGRAMS[stage])
    first, second = [at for at in of_kind(StageSend, stage) if steps[at].message.target == stage + 1][:2]
    late = steps.pop(first)
    steps.insert(second, late)
    with pytest.raises(PipelineError) as caught:
        check_programs(changed(stage, steps), PLACEMENT)
    assert isinstance(caught.value.value, StageSend | StageReceive | PipelineTask)


def test_two_stages_that_both_send_first_are_refused() -> None:
    """A backend that keeps messages would forgive this, and one that waits for the receiver would not."""
    table = make_table("1f1b", 2, 4)
    up, down = programs_of(table)
    second = [at for at, step in enumerate(down) if isinstance(step, StageReceive)][1]
    answer = next(at for at, step in enumerate(down) if isinstance(step, StageSend))
    assert second < answer
    late = list(down)
    late.insert(answer, late.pop(second))
    with pytest.raises(PipelineError) as caught:
        check_programs((up, tuple(late)), table.placement)
    text = caught.value.message
    assert "wait for ever" in text
    assert "stage 0, step 3: it sends stage 1 the output of micro-batch 1 from chunk 0" in text
    assert "stage 1, step 3: it sends stage 0 the gradient of micro-batch 0 from chunk 1" in text
