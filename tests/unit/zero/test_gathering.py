"""Sharded buckets made whole and freed by ranks that do the same: holds, known orders, prefetching, bounds, memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import InvariantError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.buckets.gathered_buckets import GatheredBuckets
from polyaccel.zero.buckets.sharded_bucket import ShardedBucket
from polyaccel.zero.plan.bucket_plan import plan_step
from polyaccel.zero.plan.gather_schedule import EventKind, SyncPoint, event, merge_schedules
from polyaccel.zero.plan.layout import plan_layout
from polyaccel.zero.plan.policy import GatherPolicy, StepPolicy, ZeroPolicy
from polyaccel.zero.resources import Communicators

NUMEL = 64


class Recorder:
    """What a frontend is told, as a text: `+2` bucket 2 was bound, `-2` freed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def show(self, bucket, views) -> None:
        self.told.append(f"+{bucket.index}")

    def hide(self, bucket) -> None:
        self.told.append(f"-{bucket.index}")

    def take(self) -> str:
        told, self.told = " ".join(self.told), []
        return told


def make(communicator, count: int, **policy) -> tuple[GatheredBuckets, Recorder]:
    """`count` buckets of 64 elements, whose elements all have the value of their index."""
    params = [ParamSpec(str(index), (NUMEL,), DType.FLOAT32) for index in range(count)]
    layout = plan_layout(params, mesh=Mesh.flat(communicator.world_size), max_bucket_numel=NUMEL)
    places = []
    for plan in plan_step(layout, ZeroPolicy.of_stage(3), StepPolicy()).buckets:
        bucket = plan.bucket
        own = communicator.accelerator.allocate(bucket.shard_numel, DType.FLOAT32)
        own.fill(float(bucket.index))
        places.append(ShardedBucket(plan, own, None))
    recorder = Recorder()
    gathering = GatheredBuckets(
        places,
        GatherPolicy(**{"max_live_numel": 10**9, "prefetch_numel": 0, "max_reuse_numel": 0, **policy}),
        Communicators.plain(communicator),
        recorder,
        nullcontext,
    )
    return gathering, recorder


def hold(gathering: GatheredBuckets, index: int) -> None:
    """As the course says, if it does."""
    if gathering.schedule.peek() == event(EventKind.UNSHARD, index):
        gathering.schedule.step()
    gathering.unshard(index, ahead=True)


def use(gathering: GatheredBuckets, *indices: int) -> None:
    for index in indices:
        hold(gathering, index)
        if gathering.schedule.peek() == event(EventKind.RESHARD, index):
            gathering.schedule.step()
        gathering.reshard(index)


def expect(gathering: GatheredBuckets, *indices: int) -> None:
    """A step begins that is known to use these buckets."""
    gathering.end_step()
    events = tuple(event(kind, index) for index in indices for kind in (EventKind.UNSHARD, EventKind.RESHARD))
    gathering.schedule.begin_step(merge_schedules((), [[(SyncPoint.FORWARD, events)]]))


def on_two_ranks(work, *args):
    return run_threads(2, work, *args)


def test_holds_nest_and_the_last_one_frees():
    def work(communicator):
        gathering, recorder = make(communicator, 2)
        gathering.unshard(1)
        gathering.unshard(1)
        assert recorder.take() == "+1"
        assert gathering.full(1).raw.tolist() == [1.0] * NUMEL
        gathering.reshard(1)
        assert (recorder.take(), gathering.live_numel) == ("", NUMEL)
        gathering.reshard(1)
        assert (recorder.take(), gathering.live_numel) == ("-1", 0)
        with pytest.raises(ShardingError) as caught:
            gathering.full(1)
        assert caught.value.value == 1
        with pytest.raises(InvariantError) as caught:
            gathering.reshard(1)
        assert caught.value.value == 1

    on_two_ranks(work)


@pytest.mark.parametrize("failing", [2, 3])
def test_who_fails_to_get_a_bucket_does_not_hold_it(failing):
    """Whether its own gather fails or one ahead."""

    def work(communicator):
        gathering, _ = make(communicator, 4, prefetch_numel=NUMEL)
        expect(gathering, 2, 3)
        all_gather = communicator.all_gather

        def fail(out, source, **rest):
            if rest["bucket"] == failing:
                raise KeyError(failing)
            return all_gather(out, source, **rest)

        communicator.all_gather = fail
        with pytest.raises(KeyError):
            hold(gathering, 2)
        gathering.require_idle()
        gathering.free_idle()
        assert gathering.live_numel == 0
        communicator.all_gather = all_gather
        use(gathering, 2, 3)

    on_two_ranks(work)


def test_the_learned_order_is_gathered_ahead_as_far_as_the_bound_reaches():
    def work(communicator, ahead):
        gathering, recorder = make(communicator, 5, prefetch_numel=ahead * NUMEL)
        use(gathering, 3, 1, 4)
        assert recorder.take() == "+3 -3 +1 -1 +4 -4"
        expect(gathering, 3, 1, 4)
        hold(gathering, 3)
        return gathering.live_numel // NUMEL

    assert [on_two_ranks(work, ahead)[0] for ahead in (0, 1, 2, 3)] == [1, 2, 3, 3]


def test_gathers_ahead_count_until_they_are_used():
    """Buckets gathered on demand in between do not make room for more ahead of their use."""

    def work(communicator):
        gathering, _ = make(communicator, 6, prefetch_numel=NUMEL)
        expect(gathering, 0, 1, 2, 3)
        hold(gathering, 5)  # strange: nothing ahead of it is used up
        hold(gathering, 4)
        return gathering.live_numel // NUMEL

    assert on_two_ranks(work) == [3, 3]


def test_an_idle_bucket_is_kept_while_its_next_use_is_near():
    def work(communicator, reuse):
        gathering, recorder = make(communicator, 3, max_reuse_numel=reuse)
        expect(gathering, 0, 1, 0, 2)
        use(gathering, 0, 1, 0, 2)
        return recorder.take()

    assert on_two_ranks(work, NUMEL)[0] == "+0 +1 -1 -0 +2 -2"
    assert on_two_ranks(work, NUMEL - 1)[0] == "+0 -0 +1 -1 +0 -0 +2 -2"


def test_room_is_made_by_freeing_what_is_needed_last():
    def work(communicator):
        gathering, recorder = make(communicator, 3, max_live_numel=2 * NUMEL, max_reuse_numel=10**9)
        order = (0, 1, 2, 0, 1)
        expect(gathering, *order)
        use(gathering, *order)
        return recorder.take(), gathering.peak_numel

    assert on_two_ranks(work)[0] == ("+0 +1 -1 +2 -2 -0 +1 -1", 2 * NUMEL)


def test_what_held_buckets_forced_above_the_bound_is_not_kept():
    def work(communicator):
        gathering, recorder = make(communicator, 2, max_live_numel=NUMEL, max_reuse_numel=10**9)
        expect(gathering, 0, 1, 1, 0)
        hold(gathering, 0)
        use(gathering, 1, 1)
        return recorder.take()

    assert on_two_ranks(work)[0] == "+0 +1 -1 +1 -1"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_is_asked_in_whatever_order(data):
    """Values are right, holds are honoured, and idle buckets never take more than the bound leaves."""
    bound = data.draw(st.integers(1, 5)) * NUMEL
    gathering, _ = make(
        SingleCommunicator(CpuAccelerator(), timeout_s=1.0),
        5,
        max_live_numel=bound,
        prefetch_numel=data.draw(st.integers(0, 5)) * NUMEL,
        max_reuse_numel=data.draw(st.integers(0, 5)) * NUMEL,
    )
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        used: list[int] = []
        for _ in range(data.draw(st.integers(0, 8))):
            if held and data.draw(st.booleans()):
                gathering.reshard(held.pop())
            else:
                index = data.draw(st.integers(0, 4))
                gathering.unshard(index, ahead=data.draw(st.booleans()))
                used.append(index)
                held.append(index)
            for index in held:
                assert gathering.full(index).raw[0] == index
            assert gathering.live_numel <= max(bound, len(set(held)) * NUMEL)
        while held:
            gathering.reshard(held.pop())
        expect(gathering, *used)
        assert gathering.live_numel == 0


def test_memory_that_somebody_keeps_is_not_lent_again():
    def work(communicator):
        gathering, _ = make(communicator, 2)
        use(gathering, 0)
        gathering.unshard(0)
        kept = gathering.full(0).raw[:3]
        gathering.reshard(0)
        gathering.unshard(1)
        assert kept.tolist() == [0.0, 0.0, 0.0]
        assert kept.data_ptr() != gathering.full(1).raw.data_ptr()
        pointer = gathering.full(1).raw.data_ptr()
        gathering.reshard(1)
        gathering.unshard(0)
        assert gathering.full(0).raw.data_ptr() == pointer  # nobody keeps that one

    on_two_ranks(work)


def test_a_single_rank_gathers_nothing():
    def work(communicator):
        gathering, _ = make(communicator, 2)
        gathering.unshard(1)
        return gathering.full(1).raw.data_ptr() == gathering._buckets[1].own.raw.data_ptr()

    assert run_threads(1, work) == [True]


def test_a_look_binds_nothing():
    def work(communicator):
        gathering, recorder = make(communicator, 2, max_live_numel=NUMEL)
        with gathering.unsharded_view(1) as whole:
            assert whole.raw.tolist() == [1.0] * NUMEL
            assert gathering.live_numel == NUMEL
        assert (gathering.live_numel, recorder.take()) == (0, "")
        gathering.unshard(0)
        with gathering.unsharded_view(0) as whole:
            assert whole is gathering.full(0)
        assert gathering.is_whole(0)

    on_two_ranks(work)


def test_new_values_are_gathered_again_where_they_are_in_use():
    def work(communicator):
        gathering, recorder = make(communicator, 2)
        gathering.unshard(0)
        recorder.take()
        for index in (0, 1):
            gathering._buckets[index].own.fill(7.0 + communicator.rank)
            gathering.refresh(index)
        assert gathering.full(0).raw.tolist() == [7.0] * (NUMEL // 2) + [8.0] * (NUMEL // 2)
        assert not gathering.is_whole(1)
        assert recorder.take() == ""

    on_two_ranks(work)


def test_an_update_waits_for_nobody_who_holds():
    def work(communicator):
        gathering, _ = make(communicator, 3)
        gathering.unshard(2)
        with pytest.raises(ShardingError) as caught:
            gathering.end_step()
        assert caught.value.value == [2]
        with pytest.raises(ShardingError) as caught:
            gathering.suspend()
        assert caught.value.value == [2]
        gathering.reshard(2)
        gathering.suspend()
        with pytest.raises(ShardingError) as caught:
            gathering.unshard(0)
        assert caught.value.value == 0

    on_two_ranks(work)
