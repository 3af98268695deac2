"""Ranks that use different buckets, or the same in another order, gather them together: no rank is left waiting, and
each has what it uses whole for as long as it does."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import CommError, InvariantError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.buckets.gathered_buckets import GatheredBuckets
from polyaccel.zero.buckets.sharded_bucket import ShardedBucket
from polyaccel.zero.buckets.unsharder import Unsharder
from polyaccel.zero.plan.bucket_plan import plan_step
from polyaccel.zero.plan.gather_schedule import SyncPoint
from polyaccel.zero.plan.layout import plan_layout
from polyaccel.zero.plan.policy import GatherPolicy, StepPolicy, ZeroPolicy
from polyaccel.zero.resources import Communicators

NUMEL = 12  # of a bucket: whole parts for two and three ranks
COUNT = 5
Step = tuple[str, str]
"""What a rank does in a forward and a backward pass: `(` after a bucket begins its use, `)` ends the last one, `=`
after a bucket releases it."""


@dataclass
class Rank:
    """One rank's uses of buckets whose elements all have the value of their index."""

    communicator: Any
    policy: dict[str, int]
    log: list[str] = field(default_factory=list)
    """The calls that all ranks must make alike."""

    def __post_init__(self) -> None:
        communicator = self.communicator
        params = [ParamSpec(str(index), (NUMEL,), DType.FLOAT32) for index in range(COUNT)]
        layout = plan_layout(params, mesh=Mesh.flat(communicator.world_size), max_bucket_numel=NUMEL)
        places = []
        for plan in plan_step(layout, ZeroPolicy.of_stage(3), StepPolicy()).buckets:
            own = communicator.accelerator.allocate(plan.bucket.shard_numel, DType.FLOAT32)
            own.fill(float(plan.bucket.index))
            places.append(ShardedBucket(plan, own, None))
        self.bound: set[int] = set()
        self.launched: set[int] = set()
        policy = GatherPolicy(**{"max_live_numel": 10**9, "prefetch_numel": 0, "max_reuse_numel": 0, **self.policy})
        self.gathering = GatheredBuckets(
            *(places, policy, Communicators.plain(communicator)),
            self,
            nullcontext,
        )
        self.uses = Unsharder(
            *(self.gathering, self, communicator),
            is_active=True,
            warn=False,
            is_fixed=policy.is_fixed,
        )
        real = communicator.all_gather

        def noted(*args: Any, bucket: int | None = None, **rest: Any) -> Any:
            self.log.append("vote" if bucket is None else f"gather {bucket}")
            return real(*args, bucket=bucket, **rest)

        communicator.all_gather = noted

    def show(self, bucket: Any, views: Any) -> None:
        self.bound.add(bucket.index)

    def hide(self, bucket: Any) -> None:
        self.bound.discard(bucket.index)

    def can_launch(self, index: int) -> bool:
        return index not in self.launched

    def launch(self, index: int) -> None:
        if index not in self.launched:
            self.launched.add(index)
            self.log.append(f"launch {index}")

    def play(self, text: str, *, learn: bool = True) -> None:
        held: list[int] = []
        self.uses.learns = learn
        for index, what in zip(text[::2], text[1::2], strict=True):
            if what == "(":
                held.append(int(index))
                self.uses.unshard(int(index))
            elif what == ")":  # of the last one that began
                self.uses.reshard(held.pop())
            else:
                self.uses.release(int(index))
            for used in held:
                assert set(self.gathering.full(used).raw.tolist()) == {float(used)}
                assert used in self.bound
        assert not held

    def step(self, forward: str, backward: str) -> list[str]:
        """Returns the calls of the step but for votes."""
        self.launched.clear()
        before = len(self.log)
        self.play(forward)
        self.uses.sync(SyncPoint.FORWARD)
        self.play(backward)
        self.uses.sync(SyncPoint.BACKWARD)
        told = self.communicator.all_gather_object(self.uses.has_deviated)
        self.uses.end_step(learn=any(told))
        assert (self.gathering.live_numel, self.gathering.kept_numel, self.bound) == (0, 0, set())
        return self.log[before:]

    def evaluate(self, text: str) -> None:
        self.play(text, learn=False)
        self.uses.sync(SyncPoint.EVALUATION)
        self.uses.learns = True


def on_ranks(world: int, work: Any, **policy: int) -> list[Any]:
    """`work(rank)` on every rank; all must make the same calls."""

    def run(communicator: Any) -> tuple[Any, list[str]]:
        rank = Rank(communicator, policy)
        return work(rank), rank.log

    results = run_threads(world, run)
    for _, log in results:
        assert log == results[0][1]
    return [told for told, _ in results]


def of(*indices: int) -> str:
    """One use after the other, and what is left in backward order."""
    return "".join(f"{index}({index})" for index in indices)


def back(*indices: int) -> str:
    return "".join(f"{index}({index}){index}=" for index in indices[::-1])


def test_from_the_second_step_on_ranks_that_do_the_same_vote_at_meetings_alone():
    def work(rank: Rank) -> list[list[str]]:
        return [rank.step(of(0, 1, 2), back(0, 1, 2)) for _ in range(3)]

    first, second, third = on_ranks(2, work)[0]
    assert Counter(first)["vote"] == 6 + 3 + 2
    gathers = ["gather 0", "gather 1", "gather 2", "vote"]
    gathers += ["launch 2", "gather 1", "launch 1", "gather 0", "launch 0", "vote"]
    assert second == third == gathers


def test_what_others_skip_is_gathered_in_passing():
    def work(rank: Rank) -> list[list[str]]:
        mine = (0, 1, 3) if rank.communicator.rank else (0, 2, 3)
        return [rank.step(of(*mine), back(*mine)) for _ in range(3)]

    _, second, third = on_ranks(2, work)[0]
    gathers, launches = ({f"{what} {index}" for index in range(4)} for what in ("gather", "launch"))
    assert Counter(second) == {"vote": 2, **dict.fromkeys(gathers, 2), **dict.fromkeys(launches, 1), "gather 3": 1}
    assert second == third


def test_a_surprise_is_asked_for_and_known_the_next_time():
    def work(rank: Rank) -> list[int]:
        votes = []
        for step in range(4):
            more = (3,) if step >= 2 and rank.communicator.rank else ()
            votes.append(Counter(rank.step(of(0, 1, 2, *more), back(0, 1, 2, *more)))["vote"])
        return votes

    assert on_ranks(2, work)[0][1:] == [2, 3 + 4, 2]  # in backward for all that follows, too


def test_ranks_of_a_fixed_order_meet_without_a_vote_once_a_step_went_by_its_schedule():
    def work(rank: Rank) -> list[int]:
        votes = []
        for step in range(6):
            fewer = (0, 1) if step == 3 and rank.communicator.rank else (0, 1, 2)
            votes.append(Counter(rank.step(of(*fewer), back(*fewer)))["vote"])
            rank.evaluate(of(3))
        return votes

    assert on_ranks(2, work, is_fixed=True)[0][1:] == [2, 0, 0, 2, 0]


def test_a_rank_that_leaves_a_fixed_order_is_told():
    def work(rank: Rank) -> None:
        for _ in range(3):
            rank.step(of(0, 1, 2), back(0, 1, 2))
        with pytest.raises(ShardingError) as caught:
            rank.play(of(0, 1, 3))
        assert caught.value.value == 9
        rank.uses.abandon()
        with pytest.raises(ShardingError) as caught:
            rank.uses.sync(SyncPoint.BACKWARD)
        assert caught.value.value == -1 - SyncPoint.BACKWARD

    on_ranks(2, work, is_fixed=True)


def test_what_the_ranks_free_stays_with_the_one_that_uses_it():
    def work(rank: Rank) -> None:
        longer = "0(1(1)2(2)0)" if rank.communicator.rank else of(0, 1, 2)
        for _ in range(3):
            rank.step(longer, "")

    on_ranks(2, work)


def test_evaluations_differ_too_and_change_nothing():
    def work(rank: Rank) -> None:
        for step in range(3):
            rank.step(of(0, 1, 2), back(0, 1, 2))
            rank.evaluate(of(*range(rank.communicator.rank + 1), 3))
            if step:
                assert not rank.uses.has_deviated

    on_ranks(3, work)


def test_what_is_there_needs_no_vote():
    """As where everything is kept from one evaluation to the next."""

    def work(rank: Rank) -> int:
        for _ in range(2):
            rank.step(of(0, 1, 2), back(0, 1, 2))
        rank.evaluate(of(0, 1, 2))
        before = len(rank.log)
        rank.evaluate(of(0, 1, 2))
        return len(rank.log) - before

    assert on_ranks(2, work, max_reuse_numel=10**9)[0] == 1


def test_failed_passes_are_not_learned():
    def work(rank: Rank) -> None:
        rank.step(of(0, 1), back(0, 1))
        rank.step(of(0, 1), back(0, 1))
        rank.play(of(0, 3))
        rank.uses.abandon()
        rank.play(of(0, 1))
        rank.uses.sync(SyncPoint.FORWARD)
        rank.play(back(0, 1))
        rank.uses.sync(SyncPoint.BACKWARD)
        assert not rank.uses.has_deviated
        rank.uses.end_step(learn=False)

    on_ranks(2, work)


def test_ranks_at_different_ends_are_told():
    def work(rank: Rank) -> None:
        if rank.communicator.rank == 1:
            rank.uses.sync(SyncPoint.FORWARD)
        else:
            rank.uses.learns = False
            rank.uses.sync(SyncPoint.EVALUATION)

    with pytest.raises(CommError) as caught:
        on_ranks(3, work)
    assert all(part in str(caught.value) for part in ("ranks [0, 2]", "ranks [1]"))


def test_mistakes_are_told():
    def work(rank: Rank) -> None:
        rank.uses.learns = False
        rank.uses.unshard(2)
        with pytest.raises(ShardingError) as caught:
            rank.uses.require_idle()
        assert caught.value.value == [2]
        rank.uses.reshard(2)
        with pytest.raises(InvariantError) as caught:
            rank.uses.reshard(2)
        assert caught.value.value == 2

    on_ranks(2, work)


@st.composite
def programs(draw: Any, signs: str = "(") -> str:
    """Uses of any bucket that nest, and releases if `signs` has them."""
    text, depth = "", 0
    for _ in range(draw(st.integers(0, 7))):
        if depth and draw(st.booleans()):
            text, depth = text + "_)", depth - 1
        else:
            index, what = draw(st.integers(0, COUNT - 1)), draw(st.sampled_from(signs))
            text, depth = f"{text}{index}{what}", depth + (what == "(")
    return text + "_)" * depth


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_ranks_use_in_whatever_order(data: Any) -> None:
    world = data.draw(st.integers(2, 3))
    policy = {
        "max_live_numel": data.draw(st.integers(1, COUNT)) * NUMEL,
        "prefetch_numel": data.draw(st.integers(0, COUNT)) * NUMEL,
        "max_reuse_numel": data.draw(st.integers(0, COUNT)) * NUMEL,
    }
    ways = st.tuples(programs(), programs("((="), programs())
    one = st.one_of(st.sampled_from(data.draw(st.lists(ways, min_size=1, max_size=3))), ways)
    steps = data.draw(st.lists(st.tuples(st.booleans(), *[one] * world), min_size=1, max_size=5))

    def work(rank: Rank) -> None:
        for evaluates, *mine in steps:
            forward, backward, evaluation = mine[rank.communicator.rank]
            rank.step(forward, backward)
            if evaluates:
                rank.evaluate(evaluation)
                rank.gathering.free_idle()

    on_ranks(world, work, **policy)
