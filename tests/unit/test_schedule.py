"""What a step does to each bucket, how often and in which order, and what it sends."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.errors import ShardingError
from polyaccel.types import DType, ParamSpec
from polyaccel.zero.layout import ShardLayout, plan_layout
from polyaccel.zero.policy import Placement, ZeroPolicy
from polyaccel.zero.precision import Precision
from polyaccel.zero.schedule import Operation, OpKind, plan_step
from polyaccel.zero.traffic import StepTraffic, step_traffic

STAGES = [0, 1, 2, 3]
SHORT = {
    OpKind.UNSHARD: "U",
    OpKind.RESHARD: "R",
    OpKind.FORWARD: "F",
    OpKind.BACKWARD: "B",
    OpKind.REDUCE_SCATTER: "rs",
    OpKind.ALL_REDUCE: "ar",
    OpKind.FETCH: "f",
    OpKind.UPDATE: "u",
    OpKind.PUBLISH: "p",
    OpKind.EVICT: "e",
}


def _layout(*units: str, frozen: tuple[int, ...] = (), world_size: int = 2) -> ShardLayout:
    """One bucket an entry, in layout order."""
    params = [
        ParamSpec(f"p{index}", (100 + index,), DType.FLOAT32, trainable=index not in frozen)
        for index in range(len(units))
    ]
    names = {f"p{index}": unit for index, unit in enumerate(units)}
    return plan_layout(params, world_size=world_size, max_bucket_numel=1, units=names)


def _written(stage: int, layout: ShardLayout, micro_batches: int = 1) -> str:
    operations = plan_step(ZeroPolicy.of_stage(stage), layout, micro_batches=micro_batches)
    return " ".join(f"{SHORT[operation.kind]}{operation.bucket}" for operation in operations)


@pytest.mark.parametrize(
    ("stage", "written"),
    [
        (0, "F1 F0 B0 B1 F1 F0 B0 ar0 B1 ar1 f1 u1 e1 f0 u0 e0"),
        (1, "F1 F0 B0 B1 F1 F0 B0 rs0 B1 rs1 f1 u1 p1 e1 f0 u0 p0 e0"),
        (2, "F1 F0 B0 rs0 B1 rs1 F1 F0 B0 rs0 B1 rs1 f1 u1 p1 e1 f0 u0 p0 e0"),
        (3, "U1 U0 F1 F0 B0 rs0 B1 rs1 F1 F0 B0 rs0 B1 R1 R0 rs1 f1 u1 e1 f0 u0 e0"),
    ],
)
def test_a_step_of_two_micro_batches_without_units(stage: int, written: str) -> None:
    assert _written(stage, _layout("", ""), micro_batches=2) == written


def test_units_are_unsharded_one_after_the_other_and_kept_at_the_turn() -> None:
    written = _written(3, _layout("c", "b", "a"))
    assert written == "U2 F2 R2 U1 F1 R1 U0 F0 B0 R0 rs0 U1 B1 R1 rs1 U2 B2 R2 rs2 f2 u2 e2 f1 u1 e1 f0 u0 e0"


def test_the_next_micro_batch_finds_its_first_unit_unsharded() -> None:
    written = _written(3, _layout("b", "a"), micro_batches=2)
    assert written.startswith("U1 F1 R1 U0 F0 B0 R0 rs0 U1 B1 rs1 F1 R1 U0 F0 B0 R0 rs0 U1 B1 R1 rs1 f1")


def test_a_unit_of_several_buckets_lives_and_ends_together() -> None:
    written = _written(3, _layout("b", "a", "a"))
    assert written.startswith("U2 U1 F2 F1 R2 R1 U0 F0 B0 R0 rs0 U2 U1 B1 rs1 B2 R2 R1 rs2 ")


def test_the_root_unit_is_live_throughout_and_comes_last_in_backward() -> None:
    written = _written(3, _layout("", "b", "a", ""))
    assert written.startswith("U3 U0 F3 F0 U2 F2 R2 U1 F1 B1 R1 rs1 U2 B2 R2 rs2 B0 rs0 B3 R3 R0 rs3 f3 ")


def test_frozen_buckets_run_and_nothing_else() -> None:
    layout = _layout("c", "b", "a", frozen=(1,))
    for stage in STAGES:
        operations = plan_step(ZeroPolicy.of_stage(stage), layout, micro_batches=2)
        kinds = Counter(operation.kind for operation in operations if operation.bucket == 1)
        moves = {OpKind.UNSHARD: 4, OpKind.RESHARD: 4} if stage == 3 else {}
        assert kinds == {OpKind.FORWARD: 2, OpKind.BACKWARD: 2, **moves}


def test_replicated_gradients_beside_sharded_parameters_wait_for_the_boundary() -> None:
    policy = ZeroPolicy(optim=Placement.SHARDED, grads=Placement.REPLICATED, params=Placement.SHARDED)
    operations = plan_step(policy, _layout("a"), micro_batches=2)
    assert [op.micro_batch for op in operations if op.kind is OpKind.REDUCE_SCATTER] == [1]
    assert not [op for op in operations if op.kind is OpKind.PUBLISH]


@pytest.mark.parametrize("micro_batches", [0, -1])
def test_a_step_without_micro_batches_is_refused(micro_batches: int) -> None:
    with pytest.raises(ShardingError, match=f"a step of {micro_batches} micro-batches does nothing"):
        plan_step(ZeroPolicy.of_stage(2), _layout("a"), micro_batches=micro_batches)


def test_a_model_without_parameters_has_nothing_to_do() -> None:
    assert plan_step(ZeroPolicy.of_stage(3), _layout(), micro_batches=2) == ()


def test_an_operation_is_written_for_people() -> None:
    assert str(Operation(OpKind.REDUCE_SCATTER, 3, 1)) == "reduce_scatter(bucket 3, micro-batch 1)"


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
        params, world_size=draw(st.integers(1, 5)), max_bucket_numel=draw(st.integers(1, 500)), units=units
    )


@settings(deadline=None)
@given(layouts(), st.sampled_from(STAGES), st.integers(1, 4))
def test_every_bucket_gets_what_its_policy_says(layout: ShardLayout, stage: int, micro_batches: int) -> None:
    policy = ZeroPolicy.of_stage(stage)
    operations = plan_step(policy, layout, micro_batches=micro_batches)
    assert [op.micro_batch for op in operations] == sorted(op.micro_batch for op in operations)
    for bucket in layout.buckets:
        own = [operation for operation in operations if operation.bucket == bucket.index]
        kinds = Counter(operation.kind for operation in own)
        trained = int(bucket.kind.trainable)
        assert kinds[OpKind.FORWARD] == kinds[OpKind.BACKWARD] == micro_batches
        assert kinds[OpKind.UPDATE] == kinds[OpKind.FETCH] == kinds[OpKind.EVICT] == trained
        assert kinds[OpKind.ALL_REDUCE] == trained * (stage == 0)
        assert kinds[OpKind.REDUCE_SCATTER] == trained * {0: 0, 1: 1}.get(stage, micro_batches)
        assert kinds[OpKind.PUBLISH] == trained * (stage in (1, 2))


@settings(deadline=None)
@given(layouts(), st.integers(1, 3))
def test_sharded_parameters_are_live_when_used_and_never_otherwise(layout: ShardLayout, micro_batches: int) -> None:
    live: set[int] = set()
    for operation in plan_step(ZeroPolicy.of_stage(3), layout, micro_batches=micro_batches):
        if operation.kind is OpKind.UNSHARD:
            assert operation.bucket not in live
            live.add(operation.bucket)
        elif operation.kind is OpKind.RESHARD:
            live.remove(operation.bucket)
        elif operation.kind in (OpKind.FORWARD, OpKind.BACKWARD):
            unit = layout.buckets[operation.bucket].kind.unit
            assert {bucket.index for bucket in layout.buckets if bucket.kind.unit in (unit, "")} <= live
        elif operation.kind is OpKind.UPDATE:
            assert not live
    assert not live


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
        operations = plan_step(ZeroPolicy.of_stage(stage), layout, micro_batches=micro_batches)
        assert step_traffic(operations, layout) == traffic


def test_sharded_parameters_are_gathered_for_forward_and_backward() -> None:
    layout = _layout("c", "b", "a", frozen=(2,))
    traffic = step_traffic(plan_step(ZeroPolicy.of_stage(3), layout), layout)
    halves = [bucket.numel // 2 for bucket in layout.buckets]
    assert traffic.all_gather_numel == halves[0] + 2 * halves[1] + 2 * halves[2]  # 0 is kept at the turn
    assert traffic.reduce_scatter_numel == halves[0] + halves[1]
    assert traffic.total_numel == traffic.all_gather_numel + traffic.reduce_scatter_numel


def test_persistent_parameters_are_published_instead_of_gathered() -> None:
    params = [ParamSpec("a", (256,), DType.BFLOAT16), ParamSpec("bias", (64,), DType.BFLOAT16)]
    layout = plan_layout(params, world_size=2, max_bucket_numel=1000, units={"a": "u"}, persistent={"bias"})
    kinds = {
        index: Counter(op.kind for op in plan_step(ZeroPolicy.of_stage(3), layout) if op.bucket == index)
        for index in (0, 1)
    }
    assert kinds[0][OpKind.UNSHARD] == kinds[0][OpKind.RESHARD] > 0
    assert kinds[0][OpKind.PUBLISH] == 0
    assert kinds[1][OpKind.UNSHARD] == kinds[1][OpKind.RESHARD] == 0
    assert kinds[1][OpKind.PUBLISH] == 1


def test_gradients_travel_in_a_type_of_their_own() -> None:
    layout = _layout("a")
    operations = plan_step(ZeroPolicy.of_stage(2), layout)
    half = layout.buckets[0].numel // 2
    traffic = step_traffic(operations, layout, Precision(reduce=DType.BFLOAT16))
    assert traffic.total_nbytes == half * 2 + half * 4


def test_one_rank_sends_nothing() -> None:
    layout = _layout("a", "b", world_size=1)
    for stage in STAGES:
        assert step_traffic(plan_step(ZeroPolicy.of_stage(stage), layout), layout).total_numel == 0
