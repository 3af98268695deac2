"""The schedule, run by the specification: every stage computes what one process does, and broken schedules are seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.errors import InvariantError
from polyaccel.testkit.chain import Batch, Chain, FloatArray, train_plain
from polyaccel.testkit.interpreter import Interpreter
from polyaccel.types import DType, ParamSpec
from polyaccel.zero.layout import ShardLayout, plan_layout
from polyaccel.zero.memory import Purpose, estimate_layout
from polyaccel.zero.policy import ZeroPolicy
from polyaccel.zero.precision import Precision
from polyaccel.zero.schedule import Operation, OpKind, plan_step
from polyaccel.zero.traffic import step_traffic

STAGES = [0, 1, 2, 3]
IN_FLOAT64 = Precision(master=DType.FLOAT64, states=DType.FLOAT64)


def _param(fqn: str, *shape: int, group: int = 0, trainable: bool = True) -> ParamSpec:
    return ParamSpec(fqn, shape, DType.FLOAT64, group, trainable)


# Odd sizes, two optimizer groups that interleave, frozen, zero-dimensional, unused and empty parameters.
PARAMS = (
    _param("embed.weight", 3, 5),
    _param("block.0.weight", 5, 7),
    _param("block.0.bias", 7, group=1),
    _param("block.0.scale"),
    _param("block.0.never", 11),
    _param("block.1.weight", 7, 5),
    _param("block.1.frozen", 5, trainable=False),
    _param("block.1.empty", 0),
    _param("block.2.weight", 5, 13),
    _param("block.2.bias", 13, group=1),
    _param("block.3.weight", 13, 5),
    _param("head.scale", group=1),
)
UNUSED = {"block.0.never", "block.1.empty"}
LINKS = tuple(param.fqn for param in PARAMS if param.fqn not in UNUSED)
# Tied: the head's scale is used near both ends, and the frozen bias once more at the end.
CHAIN = Chain(PARAMS, (LINKS[0], "head.scale", *LINKS[1:-1], "block.1.frozen", "head.scale"))
UNITS = {param.fqn: ".".join(param.fqn.split(".")[:2]) for param in PARAMS if param.fqn.startswith("block")}
UNITS_OF_ROOT_USE = {"block.1.frozen"}  # used again after block.3: belongs to the root


def _layout(
    world_size: int, max_bucket_numel: int = 80, *, units: bool = False, params: tuple[ParamSpec, ...] = PARAMS
) -> ShardLayout:
    named = {fqn: unit for fqn, unit in UNITS.items() if fqn not in UNITS_OF_ROOT_USE} if units else None
    return plan_layout(list(reversed(params)), world_size=world_size, max_bucket_numel=max_bucket_numel, units=named)


def _batches(micro_batches: int, world_size: int, steps: int = 2) -> list[Batch]:
    return [CHAIN.sample_batch(micro_batches, world_size, seed=step) for step in range(steps)]


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, FloatArray]
    losses: list[float]
    interpreter: Interpreter


def _train(
    stage: int, layout: ShardLayout, batches: list[Batch], *, chain: Chain = CHAIN, drop: Operation | None = None
) -> Outcome:
    policy = ZeroPolicy.of_stage(stage)
    operations = plan_step(policy, layout, micro_batches=len(batches[0][0]))
    if drop is not None:
        assert drop in operations
        operations = tuple(operation for operation in operations if operation != drop)
    interpreter = Interpreter(chain, chain.init_weights(), policy, layout)
    losses = [interpreter.step(operations, batch) for batch in batches]
    return Outcome(interpreter.weights(), losses, interpreter)


@pytest.mark.parametrize("units", [False, True], ids=["one-unit", "units"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_as_one_process_does(stage: int, world_size: int, micro_batches: int, units: bool) -> None:
    batches = _batches(micro_batches, world_size)
    expected, expected_losses = train_plain(CHAIN, CHAIN.init_weights(), batches)
    outcome = _train(stage, _layout(world_size, units=units), batches)

    np.testing.assert_allclose(outcome.losses, expected_losses, rtol=0, atol=1e-12)
    for fqn, value in expected.items():
        np.testing.assert_allclose(outcome.weights[fqn], value, rtol=0, atol=1e-12, err_msg=fqn)
    initial = CHAIN.init_weights()
    moved = {fqn for fqn, value in outcome.weights.items() if not np.array_equal(value, initial[fqn])}
    assert moved == {param.fqn for param in PARAMS if param.trainable} - UNUSED


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("max_bucket_numel", [1, 80, 10_000])
def test_stages_agree_to_the_bit_with_one_micro_batch(world_size: int, max_bucket_numel: int) -> None:
    batches = _batches(1, world_size)
    outcomes = [_train(stage, _layout(world_size, max_bucket_numel, units=True), batches) for stage in STAGES]
    for outcome in outcomes[1:]:
        assert outcome.losses == outcomes[0].losses
        for fqn, value in outcomes[0].weights.items():
            assert np.array_equal(outcome.weights[fqn], value), fqn


def test_bucket_size_and_units_do_not_change_a_bit() -> None:
    batches = _batches(3, 2)
    first = _train(2, _layout(2, 1), batches)
    for layout in (_layout(2, 80), _layout(2, 10_000), _layout(2, 80, units=True)):
        other = _train(2, layout, batches)
        assert all(np.array_equal(first.weights[fqn], value) for fqn, value in other.weights.items())


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Matrices, biases and scalars of any sizes; frozen, grouped and tied at will."""
    params, links = [], []
    width = draw(st.integers(1, 4))
    for index in range(draw(st.integers(1, 8))):
        form = draw(st.sampled_from(["matrix", "bias", "scalar"])) if index else "matrix"
        out_width = draw(st.integers(1, 9)) if form == "matrix" else width
        shape = {"matrix": (width, out_width), "bias": (width,), "scalar": ()}[form]
        trainable = draw(st.booleans()) if index else True
        params.append(ParamSpec(f"p{index}", shape, DType.FLOAT64, draw(st.integers(0, 1)), trainable))
        links += [f"p{index}"] * (1 if form == "matrix" else draw(st.integers(0, 2)))
        width = out_width
    return Chain(tuple(params), tuple(links))


@settings(max_examples=40, deadline=None)
@given(chains(), st.integers(1, 4), st.integers(1, 200), st.integers(1, 3), st.booleans())
def test_any_chain_trains_the_same_at_every_stage(
    chain: Chain, world_size: int, max_bucket_numel: int, micro_batches: int, units: bool
) -> None:
    layout = plan_layout(
        list(reversed(chain.params)),
        world_size=world_size,
        max_bucket_numel=max_bucket_numel,
        units={param.fqn: param.fqn for param in chain.params} if units else None,
    )
    batches = [chain.sample_batch(micro_batches, world_size, seed=seed) for seed in range(2)]
    expected, _ = train_plain(chain, chain.init_weights(), batches)
    for stage in STAGES:
        weights = _train(stage, layout, batches, chain=chain).weights
        for fqn, value in expected.items():
            np.testing.assert_allclose(weights[fqn], value, rtol=0, atol=1e-10, err_msg=f"stage {stage} {fqn}")


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_planner_predicts_memory_and_traffic(stage: int, world_size: int, micro_batches: int) -> None:
    # One parameter a bucket and a unit, each used once: one gradient bucket is in flight at a time.
    used = tuple(param for param in PARAMS if param.fqn in LINKS)
    units = {param.fqn: param.fqn for param in used}
    layout = plan_layout(list(reversed(used)), world_size=world_size, max_bucket_numel=1, units=units)
    policy, chain = ZeroPolicy.of_stage(stage), Chain(used, LINKS)
    interpreter = _train(stage, layout, _batches(micro_batches, world_size, steps=1), chain=chain).interpreter
    estimate = estimate_layout(policy, layout, precision=IN_FLOAT64, micro_batches=micro_batches, buckets_in_flight=1)
    for purpose in interpreter.peak_numel:
        assert estimate.nbytes(purpose) == 8 * interpreter.peak_numel[purpose], purpose
    operations = plan_step(policy, layout, micro_batches=micro_batches)
    assert interpreter.sent_numel == step_traffic(operations, layout).total_numel


def test_sharded_parameters_are_never_all_live_at_once() -> None:
    layout = _layout(2, units=True)
    peak = _train(3, layout, _batches(1, 2)).interpreter.peak_numel
    whole = sum(bucket.numel for bucket in layout.buckets)
    root = sum(bucket.numel for bucket in layout.buckets if not bucket.kind.unit)
    assert root < peak[Purpose.GATHERED] < whole
    assert 2 * peak[Purpose.PARAMS] == whole


@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_that_misses_any_operation_is_refused(stage: int) -> None:
    layout, batches = _layout(2, units=True), _batches(2, 2, steps=1)
    for operation in plan_step(ZeroPolicy.of_stage(stage), layout, micro_batches=2):
        bucket = layout.buckets[operation.bucket]
        if operation.kind is OpKind.BACKWARD and not bucket.kind.trainable:
            continue  # the next bucket's backward runs through it
        if operation.kind is OpKind.FORWARD and not any(slot.param.numel for slot in bucket.slots):
            continue  # nobody needs a bucket without elements
        if operation.kind is OpKind.REDUCE_SCATTER and operation.micro_batch == 0:
            continue  # the next micro-batch's reduction takes it along
        with pytest.raises(InvariantError):
            _train(stage, layout, batches, drop=operation)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reduction_may_be_put_off_to_the_next_micro_batch(stage: int) -> None:
    layout, batches = _layout(2), _batches(3, 2)
    expected = _train(stage, layout, batches).weights
    weights = _train(stage, layout, batches, drop=Operation(OpKind.REDUCE_SCATTER, 1, 0)).weights
    for fqn, value in expected.items():
        np.testing.assert_allclose(weights[fqn], value, rtol=0, atol=1e-12, err_msg=fqn)


def test_broken_orders_are_refused() -> None:
    layout, batches = _layout(2, units=True), _batches(1, 2, steps=1)
    policy = ZeroPolicy.of_stage(3)
    operations = plan_step(policy, layout)

    def run(*changed: Operation) -> None:
        Interpreter(CHAIN, CHAIN.init_weights(), policy, layout).step(changed, batches[0])

    run(*operations)
    first = {
        kind: next(i for i, op in enumerate(operations) if op.kind is kind) for kind in {o.kind for o in operations}
    }
    reshard, reduce, update = (first[kind] for kind in (OpKind.RESHARD, OpKind.REDUCE_SCATTER, OpKind.UPDATE))
    with pytest.raises(InvariantError, match=r"gradients of .* are not complete"):
        run(*operations[:reduce], operations[reduce], *operations[reduce:])
    with pytest.raises(InvariantError, match="is not unsharded"):
        run(*operations[:reshard], operations[reshard], *operations[reshard:])
    with pytest.raises(InvariantError, match="is unsharded already"):
        run(operations[0], *operations)
    with pytest.raises(InvariantError, match=r"updates with 0 of 1 gradients"):
        run(*operations[:update], operations[update], *operations[update:])
    with pytest.raises(InvariantError, match="comes in micro-batch 0"):
        run(*operations[:update], replace(operations[update], micro_batch=1), *operations[update + 1 :])
    with pytest.raises(InvariantError, match=r"uses 'embed\.weight' while bucket \d+ is not unsharded"):
        run(*(operation for operation in operations if operation.kind not in (OpKind.UNSHARD, OpKind.RESHARD)))


def test_weights_off_padding_or_unequal_replicas_are_refused() -> None:
    layout = plan_layout([_param("a", 5)], world_size=2, max_bucket_numel=10)
    chain = Chain((_param("a", 5),), ("a",))
    for stage, element, message in (
        (3, -1, "padding of bucket 0 on rank 1"),
        (0, 0, "ranks hold different parameters"),
    ):
        interpreter = Interpreter(chain, chain.init_weights(), ZeroPolicy.of_stage(stage), layout)
        held = interpreter._ranks[1].shards if stage == 3 else interpreter._ranks[1].params
        held[0][element] = 1.0
        with pytest.raises(InvariantError, match=message):
            interpreter.weights()
