"""What a step sends, by the plan of its buckets."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.zero.plan.bucket_plan import StepPlan, plan_step
from polyaccel.zero.plan.layout import ShardLayout, plan_layout
from polyaccel.zero.plan.policy import Placement, Precision, StepPolicy, TrafficPolicy, ZeroPolicy
from polyaccel.zero.plan.traffic import StepTraffic, exchanges_of, gathers_of, step_traffic

STAGES = [0, 1, 2, 3]


def _layout(*units: str, frozen: tuple[int, ...] = (), world_size: int = 2) -> ShardLayout:
    """One bucket an entry, in layout order."""
    params = [
        ParamSpec(f"p{index}", (100 + index,), DType.FLOAT32, trainable=index not in frozen)
        for index in range(len(units))
    ]
    names = {f"p{index}": unit for index, unit in enumerate(units)}
    return plan_layout(params, mesh=Mesh.flat(world_size), max_bucket_numel=1, units=names)


def _plan(stage: int, layout: ShardLayout, **options: Any) -> StepPlan:
    return plan_step(layout, ZeroPolicy.of_stage(stage), StepPolicy(), **options)


def _exchanges(plan: StepPlan) -> str:
    short = {"all_reduce": "ar", "reduce_scatter": "rs", "all_gather": "ag"}
    return " ".join(f"{short[each.kind]}{each.bucket}" for each in exchanges_of(plan))


def _gathers(*units: str, micro_batches: int = 1, frozen: tuple[int, ...] = ()) -> dict[int, int]:
    """How often each bucket is gathered at stage 3."""
    found = gathers_of(_plan(3, _layout(*units, frozen=frozen), micro_batches=micro_batches))
    return dict(sorted(Counter(each.bucket for each in found).items()))


@pytest.mark.parametrize(
    ("stage", "written"),
    [(0, "ar0 ar1"), (1, "rs0 rs1 ag0 ag1"), (2, "rs0 rs1 rs0 rs1 ag0 ag1"), (3, "rs0 rs1 rs0 rs1")],
)
def test_reductions_of_two_micro_batches_and_published_parameters(stage: int, written: str) -> None:
    assert _exchanges(_plan(stage, _layout("", ""), micro_batches=2)) == written


def test_frozen_buckets_are_gathered_and_nothing_else() -> None:
    layout = _layout("c", "b", "a", frozen=(1,))
    for stage in STAGES:
        plan = _plan(stage, layout, micro_batches=2)
        assert "1" not in _exchanges(plan)
        assert Counter(each.bucket for each in gathers_of(plan))[1] == (4 if stage == 3 else 0)


def test_replicated_gradients_beside_sharded_parameters_wait_for_the_boundary() -> None:
    zero = ZeroPolicy(optim=Placement.SHARDED, grads=Placement.REPLICATED, params=Placement.SHARDED)
    assert _exchanges(plan_step(_layout("a"), zero, StepPolicy(), micro_batches=2)) == "rs0"


def test_units_are_gathered_for_forward_and_backward_and_kept_at_the_turn() -> None:
    assert _gathers("c", "b", "a") == {0: 1, 1: 2, 2: 2}


def test_the_next_micro_batch_finds_its_first_unit_whole() -> None:
    assert _gathers("c", "b", "a", micro_batches=3) == {0: 3, 1: 6, 2: 4}


def test_a_model_of_one_unit_is_gathered_once() -> None:
    assert _gathers("a", "a", micro_batches=3) == {0: 1, 1: 1}


def test_a_unit_of_several_buckets_is_gathered_together() -> None:
    assert _gathers("b", "a", "a") == {0: 1, 1: 2, 2: 2}


def test_the_root_unit_is_whole_throughout() -> None:
    assert _gathers("", "b", "a", "", micro_batches=2) == {0: 1, 1: 2, 2: 4, 3: 1}


def test_a_model_without_parameters_sends_nothing() -> None:
    assert step_traffic(_plan(3, _layout())).total_nbytes == 0


@st.composite
def layouts(draw: st.DrawFn) -> ShardLayout:
    params = [
        ParamSpec(
            f"p{index}", (draw(st.integers(0, 300)),), DType.BFLOAT16, draw(st.integers(0, 1)), draw(st.booleans())
        )
        for index in range(draw(st.integers(0, 8)))
    ]
    units = {param.fqn: draw(st.sampled_from(["", "a", "b", "c"])) for param in params}
    return plan_layout(
        params, mesh=Mesh.flat(draw(st.integers(1, 5))), max_bucket_numel=draw(st.integers(1, 500)), units=units
    )


@settings(deadline=None)
@given(layouts(), st.sampled_from(STAGES), st.integers(1, 4))
def test_every_bucket_gets_what_its_policy_says(layout: ShardLayout, stage: int, micro_batches: int) -> None:
    plan = _plan(stage, layout, micro_batches=micro_batches)
    for bucket in layout.buckets:
        kinds = Counter(each.kind for each in exchanges_of(plan) if each.bucket == bucket.index)
        gathers = [each for each in gathers_of(plan) if each.bucket == bucket.index]
        trained = int(bucket.kind.trainable)
        assert kinds["all_reduce"] == trained * (stage == 0)
        assert kinds["reduce_scatter"] == trained * {0: 0, 1: 1}.get(stage, micro_batches)
        assert kinds["all_gather"] == trained * (stage in (1, 2))
        assert len(gathers) in (range(1, 2 * micro_batches + 1) if stage == 3 else [0])


@settings(deadline=None)
@given(layouts(), st.integers(1, 4))
def test_traffic_is_that_of_the_formulas(layout: ShardLayout, micro_batches: int) -> None:
    psi = sum(bucket.numel for bucket in layout.buckets if bucket.kind.trainable)
    part = Fraction(layout.world_size - 1, layout.world_size) * psi
    expected = {
        0: StepTraffic(2 * part, 0, 0, total_nbytes=2 * part * 2),
        1: StepTraffic(0, part, part, total_nbytes=2 * part * 2),
        2: StepTraffic(0, micro_batches * part, part, total_nbytes=(micro_batches + 1) * part * 2),
    }
    for stage, traffic in expected.items():
        assert step_traffic(_plan(stage, layout, micro_batches=micro_batches)) == traffic


def test_sharded_parameters_are_gathered_for_forward_and_backward() -> None:
    layout = _layout("c", "b", "a", frozen=(2,))
    traffic = step_traffic(_plan(3, layout))
    halves = [bucket.numel // 2 for bucket in layout.buckets]
    assert traffic.all_gather_numel == halves[0] + 2 * halves[1] + 2 * halves[2]  # 0 is kept at the turn
    assert traffic.reduce_scatter_numel == halves[0] + halves[1]
    assert traffic.total_numel == traffic.all_gather_numel + traffic.reduce_scatter_numel


def test_persistent_parameters_are_published_instead_of_gathered() -> None:
    params = [ParamSpec("a", (256,), DType.BFLOAT16), ParamSpec("bias", (64,), DType.BFLOAT16)]
    layout = plan_layout(params, mesh=Mesh.flat(2), max_bucket_numel=1000, units={"a": "u"}, persistent={"bias"})
    plan = _plan(3, layout)
    assert _exchanges(plan) == "rs0 rs1 ag1"
    assert [each.bucket for each in gathers_of(plan)] == [0]


def test_near_ranks_gather_from_each_other_what_is_gathered_again() -> None:
    traffic = TrafficPolicy(trained_bits=8, near_ranks=2)
    layout = _layout("b", "a", world_size=4)
    sent = [(each.bucket, each.sent_numel, each.sent_nbytes) for each in gathers_of(_plan(3, layout, traffic=traffic))]
    numel = layout.buckets[1].numel
    assert numel == layout.buckets[0].numel == 128
    first = (3 * numel // 4, 3 * (numel // 4 + 4))  # a byte an element and a scale for each part
    assert sent == [(0, *first), (1, *first), (1, numel // 2, 4 * numel // 2)]


def test_gradients_travel_in_a_type_of_their_own() -> None:
    layout = _layout("a")
    half = layout.buckets[0].numel // 2
    policy = StepPolicy(precision=Precision(reduce=DType.BFLOAT16))
    assert step_traffic(plan_step(layout, ZeroPolicy.of_stage(2), policy)).total_nbytes == half * 2 + half * 4


def test_one_rank_sends_nothing() -> None:
    layout = _layout("a", "b", world_size=1)
    for stage in STAGES:
        assert step_traffic(_plan(stage, layout)).total_numel == 0
