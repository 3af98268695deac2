"""Tables of published schedules: what the papers say of bubbles and memory, and that any size can be run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.messages import StageReceive, StageSend
from polyaccel.pipeline.schedules import SCHEDULES, make_table
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTable, PipelineTask, live_counts
from polyaccel.pipeline.timeline import dependencies
from polyaccel.pipeline.timing import OpTimes, simulate

_FORWARD, _BACKWARD = PipelineOp.FORWARD, PipelineOp.BACKWARD
_INPUT, _WEIGHT = PipelineOp.BACKWARD_INPUT, PipelineOp.BACKWARD_WEIGHT

SIZES = [(1, 1), (2, 4), (3, 6), (4, 16), (8, 32)]
"""Stages and micro-batches, of which there are enough for what the papers say."""
TIMES = (10.0, 11.0, 9.0)
"""Of a chunk: forward, gradients of its input, gradients of its parameters. All schedules are tight for such times."""


def timing_of(schedule: str, stages: int, micro_batches: int, chunks: int | None = None) -> tuple[float, float]:
    """Makespan beyond the work of a stage, and the work, for even chunks of `TIMES`."""
    table = make_table(schedule, stages, micro_batches, chunks)
    check_table(table)
    timing = simulate(table, OpTimes.even(table.chunks, *TIMES))
    work = timing.busy[0]
    assert timing.busy == pytest.approx([work] * stages)
    return timing.makespan - work, work


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 7),
    st.integers(1, 17),
    st.integers(1, 4),
)
def test_any_size_of_any_schedule_can_be_run(schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
    own = SCHEDULES[schedule].chunks
    table = make_table(schedule, stages, micro_batches, chunks if own is None else None)
    assert (table.stages, table.micro_batches) == (stages, micro_batches)
    programs = check_table(table)
    sent = [[step.message for step in steps if isinstance(step, StageSend)] for steps in programs]
    received = [[step.message for step in steps if isinstance(step, StageReceive)] for steps in programs]
    for source in range(stages):
        for target in range(stages):
            there = [message for message in sent[source] if message.target == target]
            assert there == [message for message in received[target] if message.source == source]
    crossings = sum(one != other for one, other in zip(table.placement, table.placement[1:], strict=False))
    assert sum(map(len, sent)) == crossings * micro_batches * (2 if table.trains else 1)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_the_published_share(schedule: str, stages: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1) of the makespan: Narayanan et al. 2021, 2.2.1 say it by (p - 1) / m of the work."""
    table = make_table(schedule, stages, micro_batches)
    timing = simulate(table, OpTimes.even(stages, *TIMES))
    assert timing.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert timing.overhead == pytest.approx((stages - 1) / micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, micro_batches: int, chunks: int) -> None:
    """Narayanan et al. 2021, 2.2.2: (p - 1) / (m v) of the work."""
    bubble, work = timing_of("interleaved", stages, micro_batches, chunks)
    assert bubble / work == pytest.approx((stages - 1) / (micro_batches * chunks))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_zero_bubble_h1_leaves_the_published_bubble(stages: int, micro_batches: int) -> None:
    """Qi et al. 2024, 2.3: (p - 1)(T_F + T_B - T_W), where 1F1B has (p - 1)(T_F + T_B + T_W)."""
    forward, inputs, weights = TIMES
    assert timing_of("zb-h1", stages, micro_batches)[0] == pytest.approx((stages - 1) * (forward + inputs - weights))
    assert timing_of("1f1b", stages, micro_batches)[0] == pytest.approx((stages - 1) * (forward + inputs + weights))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_zero_bubble_v_never_waits(stages: int, micro_batches: int) -> None:
    """Qi et al. 2024, 6: no stage waits between its first task and its last, if the three parts take equally long."""
    table = make_table("zb-v", stages, max(micro_batches, 2 * stages))
    timing = simulate(table, OpTimes.even(table.chunks))
    assert timing.waiting == pytest.approx([0.0] * stages)
    assert timing.makespan == 6 * table.micro_batches + stages - 1


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_dual_pipe_v_leaves_no_more_than_zero_bubble_h1(stages: int, micro_batches: int) -> None:
    enough = max(micro_batches, 2 * stages)
    assert timing_of("dualpipe-v", stages, enough)[0] == pytest.approx(timing_of("zb-h1", stages, enough)[0])


def makespan_of_pairs(table: PipelineTable, pair: float) -> tuple[float, list[int]]:
    """The makespan if a forward task and the backward task right behind it are one task of length `pair`, whose
    results are there when it ends, and how many such pairs each stage has."""
    forward, inputs, weights = TIMES
    durations = {_FORWARD: forward, _BACKWARD: inputs + weights, _INPUT: inputs, _WEIGHT: weights}
    left: list[list[list[PipelineTask]]] = []
    for tasks in table.tasks:
        joined: list[list[PipelineTask]] = []
        for task in tasks:
            if joined and task.op is _BACKWARD and len(joined[-1]) == 1 and joined[-1][0].op is _FORWARD:
                joined[-1].append(task)
            else:
                joined.append([task])
        left.append(joined)
    pairs = [sum(len(each) == 2 for each in stage) for stage in left]
    done: dict[PipelineTask, float] = {}
    clocks = [0.0] * table.stages
    while any(left):
        before = len(done)
        for stage, joined in enumerate(left):
            while joined and all(need in done for task in joined[0] for need in dependencies(task, table.chunks)):
                each = joined.pop(0)
                begin = max(
                    [clocks[stage], *(done[need] for task in each for need in dependencies(task, table.chunks))]
                )
                clocks[stage] = begin + (pair if len(each) == 2 else durations[each[0].op])
                for op, *which in each:
                    done[PipelineTask(_INPUT if op is _BACKWARD else op, *which)] = clocks[stage]
        assert len(done) > before
    return max(clocks), pairs


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("pair", [30.0, 25.0], ids=["as-long-as-both", "overlapped"])
def test_dual_pipe_v_leaves_the_published_bubble(stages: int, micro_batches: int, pair: float) -> None:
    """DeepSeek-AI, DualPipe, 2025, its table: (p / 2 - 1)(F&B + B - 3W) for p chunks on p / 2 devices, where F&B is the
    time of a forward and a backward task that overlap. The last device has most of them, and waits longest."""
    forward, inputs, weights = TIMES
    table = make_table("dualpipe-v", stages, max(micro_batches, 2 * stages))
    makespan, pairs = makespan_of_pairs(table, pair)
    alone = 2 * table.micro_batches - pairs[-1]
    work = pairs[-1] * pair + alone * (forward + inputs + weights)
    assert makespan - work == pytest.approx((stages - 1) * (pair + inputs + weights - 3 * weights))


@pytest.mark.parametrize("stages", [1, 3, 4, 8])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_no_more_is_kept_than_is_promised_and_that_is_reached(schedule: str, stages: int) -> None:
    table = make_table(schedule, stages, 4 * stages)
    reached = tuple(max(live_counts(tasks)) for tasks in table.tasks)
    assert reached == table.most_live or (schedule, stages) == ("dualpipe-v", 1)


def test_what_is_kept_is_what_the_papers_say() -> None:
    stages, micro_batches = 4, 16
    kept = {name: make_table(name, stages, micro_batches).most_live for name in SCHEDULES}
    assert kept["gpipe"] == (16, 16, 16, 16)
    assert kept["1f1b"] == (4, 3, 2, 1)
    assert kept["zb-h1"] == (4, 4, 4, 4)  # the most of 1F1B
    assert kept["zb-v"] == (8, 8, 8, 8)  # of half the size
    assert kept["dualpipe-v"] == (9, 9, 9, 9)
    assert kept["interleaved"] == (11, 9, 7, 5)
    assert kept["inference"] == (0, 0, 0, 0)


def test_one_stage_of_one_forward_one_backward_is_a_plain_loop() -> None:
    (tasks,) = make_table("1f1b", 1, 3).tasks
    assert tasks == tuple(
        PipelineTask(op, index, 0) for index in range(3) for op in (PipelineOp.FORWARD, PipelineOp.BACKWARD)
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_gradients_add_up_in_the_order_of_micro_batches(schedule: str) -> None:
    """What a sum of floats must do to have the bits of one rank's."""
    for tasks in make_table(schedule, 4, 8).tasks:
        for ops in ((PipelineOp.BACKWARD, PipelineOp.BACKWARD_INPUT), (PipelineOp.BACKWARD_WEIGHT,)):
            order = [task.micro_batch for task in tasks if task.op in ops]
            assert order == sorted(order)


def test_a_message_s_time_lengthens_the_makespan_where_stages_wait_for_it() -> None:
    table = make_table("gpipe", 3, 1)
    assert simulate(table, OpTimes.even(3, 1, 1, 1)).makespan == 9
    assert simulate(table, OpTimes.even(3, 1, 1, 1, transfer=0.5)).makespan == 11
    alone = make_table("zb-v", 1, 4)  # both chunks on one stage
    assert simulate(alone, OpTimes.even(2, transfer=5.0)).makespan == 24


def test_uneven_chunks_are_bound_by_the_longest() -> None:
    table = make_table("1f1b", 3, 50)
    timing = simulate(table, OpTimes((1.0, 2.0, 1.0), (1.0, 2.0, 1.0), (1.0, 2.0, 1.0)))
    assert timing.busy == (150.0, 300.0, 150.0)
    assert timing.makespan == 304.0  # and in the middle one waits for the first forward and the first backward pass
    assert timing.idle == (154.0, 4.0, 154.0)


@pytest.mark.parametrize(
    ("schedule", "numbers", "value"),
    [
        ("2f2b", (2, 2), "2f2b"),
        ("1f1b", (0, 2), 0),
        ("1f1b", (2, 0), 0),
        ("interleaved", (2, 2, 0), 0),
        ("1f1b", (2, 2, 2), 2),
        ("zb-v", (2, 2, 3), 3),
    ],
)
def test_numbers_that_do_not_fit_are_refused(schedule: str, numbers: tuple[int, ...], value: object) -> None:
    with pytest.raises(PipelineError) as caught:
        make_table(schedule, *numbers)
    assert caught.value.value == value


def test_times_of_another_number_of_chunks_are_refused() -> None:
    with pytest.raises(PipelineError) as caught:
        simulate(make_table("1f1b", 2, 2), OpTimes.even(3))
    assert "2" in str(caught.value)
