"""Bytes per rank: the paper's formula, and exact sums over the plan of the buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.zero.plan.bucket_plan import plan_step
from polyaccel.zero.plan.layout import ShardLayout, plan_layout
from polyaccel.zero.plan.memory import MemoryEstimate, MemoryRow, Purpose, estimate_memory
from polyaccel.zero.plan.placement import Offload, Place
from polyaccel.zero.plan.policy import (
    DEFAULT_PRECISION,
    GatherPolicy,
    Placement,
    Precision,
    ReductionPolicy,
    StepPolicy,
    TrafficPolicy,
    ZeroPolicy,
)

STAGES = [0, 1, 2, 3]
NUMEL = 2**20
"""Elements that divide among four ranks without padding."""


def estimate(
    stage: int,
    layout: ShardLayout,
    *,
    precision: Precision = DEFAULT_PRECISION,
    state_count: int = 2,
    micro_batches: int = 1,
    max_in_flight: int = 3,
    max_gathered_numel: int = 1_000_000_000,
    **options: Any,
) -> MemoryEstimate:
    policy = StepPolicy(
        precision=replace(precision, accumulates=micro_batches > 1),
        reduction=ReductionPolicy(max_in_flight=max_in_flight),
        gathering=GatherPolicy(max_live_numel=max_gathered_numel),
    )
    names = [f"state{index}" for index in range(state_count)]
    zero = ZeroPolicy.of_stage(stage)
    return estimate_memory(plan_step(layout, zero, policy, state_names=names, micro_batches=micro_batches, **options))


def _bytes_a_param(stage: int, dtype: DType, *, world_size: int = 4, state_count: int = 2) -> float:
    """Of what stays between steps."""
    layout = plan_layout([ParamSpec("a", (NUMEL,), dtype)], mesh=Mesh.flat(world_size), max_bucket_numel=NUMEL)
    return estimate(stage, layout, state_count=state_count).resident_nbytes / NUMEL


@pytest.mark.parametrize(
    ("stage", "nbytes"), [(0, 2 + 2 + 12), (1, 2 + 2 + 12 / 4), (2, 2 + (2 + 12) / 4), (3, (2 + 2 + 12) / 4)]
)
def test_adam_in_16_bits_takes_16_bytes_a_parameter_less_what_is_sharded(stage: int, nbytes: float) -> None:
    assert _bytes_a_param(stage, DType.BFLOAT16) == nbytes


@pytest.mark.parametrize(("stage", "nbytes"), [(0, 4 + 4 + 8), (1, 4 + 4 + 2), (2, 4 + 1 + 2), (3, 1 + 1 + 2)])
def test_in_32_bits_the_master_weights_are_the_parameters(stage: int, nbytes: float) -> None:
    assert _bytes_a_param(stage, DType.FLOAT32) == nbytes


@pytest.mark.parametrize(
    ("dtype", "state_count", "nbytes"),
    [
        (DType.BFLOAT16, 1, 12),
        (DType.BFLOAT16, 0, 8),
        (DType.FLOAT32, 1, 12),
        (DType.FLOAT32, 0, 8),
        (DType.FLOAT64, 2, 32),
    ],
)
def test_other_optimizers_hold_other_numbers_of_states(dtype: DType, state_count: int, nbytes: int) -> None:
    assert _bytes_a_param(0, dtype, world_size=1, state_count=state_count) == nbytes


# Buckets of 640, 384 and 128 elements over two ranks; the last is frozen.
LAYOUT = plan_layout(
    [
        ParamSpec("head", (600,), DType.BFLOAT16),
        ParamSpec("body", (300,), DType.BFLOAT16),
        ParamSpec("bias", (40,), DType.BFLOAT16),
        ParamSpec("frozen", (100,), DType.BFLOAT16, trainable=False),
    ],
    mesh=Mesh.flat(2),
    max_bucket_numel=400,
    units={"head": "c", "body": "b", "bias": "b", "frozen": "a"},
)
WHOLE, FROZEN = 640 + 384, 128


@pytest.mark.parametrize(("world_size", "ahead"), [(4, True), (4, False), (1, True)])
def test_quantised_traffic_takes_codes_scales_and_two_parts_in_float32(world_size: int, ahead: bool) -> None:
    layout = plan_layout([ParamSpec("a", (NUMEL,), DType.BFLOAT16)], mesh=Mesh.flat(world_size), max_bucket_numel=NUMEL)
    policy = StepPolicy(gathering=GatherPolicy(prefetch_numel=NUMEL if ahead else NUMEL - 1))
    traffic = TrafficPolicy(trained_bits=8, gradient_bits=4)
    plan = plan_step(layout, ZeroPolicy.of_stage(3), policy, traffic=traffic, state_names=[])
    scales = 4 * NUMEL // 256
    gathered, reduced, added = NUMEL + scales, NUMEL // 2 + scales, 4 * NUMEL // 4
    expected = gathered * (2 if ahead else 1) + 2 * reduced + 2 * added
    assert estimate_memory(plan).nbytes(Purpose.CODES) == (expected if world_size > 1 else 0)


def _rows(found: MemoryEstimate) -> dict[Purpose, int]:
    assert found.total_nbytes == sum(row.nbytes for row in found.rows)
    assert [row.purpose for row in found.rows if row.place is Place.DEVICE] == list(Purpose)
    return {row.purpose: row.nbytes for row in found.rows}


@pytest.mark.parametrize(
    ("stage", "params", "updated", "grads", "in_flight", "gathered"),
    [
        (0, WHOLE + FROZEN, WHOLE, WHOLE, 0, 0),
        (1, WHOLE + FROZEN, WHOLE // 2, WHOLE, 0, 0),
        (2, WHOLE + FROZEN, WHOLE // 2, WHOLE // 2, WHOLE, 0),
        (3, (WHOLE + FROZEN) // 2, WHOLE // 2, WHOLE // 2, WHOLE, 640),
    ],
)
def test_a_layout_is_counted_exactly(
    stage: int, params: int, updated: int, grads: int, in_flight: int, gathered: int
) -> None:
    assert [bucket.numel for bucket in LAYOUT.buckets] == [640, 384, 128]
    found = estimate(stage, LAYOUT, max_gathered_numel=640)
    assert _rows(found) == {
        Purpose.PARAMS: 2 * params,
        Purpose.MASTER: 4 * updated,
        Purpose.OPTIM: 8 * updated,
        Purpose.GRADS: 2 * grads,
        Purpose.GRADS_IN_FLIGHT: 2 * in_flight,
        Purpose.GRAD_OUTSIDE: 2 * 600,
        Purpose.GATHERED: 2 * gathered,
        Purpose.SECOND: 0,
        Purpose.CODES: 0,
        Purpose.STAGING: 0,
    }
    transient = 2 * (in_flight + 600 + gathered)
    assert found.resident_nbytes == found.total_nbytes - transient


@pytest.mark.parametrize(("max_in_flight", "numel"), [(1, 640), (2, 1024), (3, 1024)])
def test_no_more_buckets_are_in_flight_than_allowed(max_in_flight: int, numel: int) -> None:
    found = estimate(2, LAYOUT, max_in_flight=max_in_flight)
    assert found.nbytes(Purpose.GRADS_IN_FLIGHT) == 2 * numel


@pytest.mark.parametrize(
    ("stage", "grads", "in_flight"),
    [(0, 4 * WHOLE, 2 * WHOLE), (1, 4 * WHOLE, 2 * WHOLE), (2, 4 * WHOLE // 2, 2 * 3 * 640)],
)
def test_16_bit_gradients_accumulate_in_32_and_travel_in_16(stage: int, grads: int, in_flight: int) -> None:
    found = estimate(stage, LAYOUT, micro_batches=3)
    assert (found.nbytes(Purpose.GRADS), found.nbytes(Purpose.GRADS_IN_FLIGHT)) == (grads, in_flight)


@pytest.mark.parametrize(
    ("precision", "micro_batches", "grads", "in_flight"),
    [
        (Precision(reduce=DType.FLOAT32), 1, 4, 0),
        (Precision(reduce=DType.FLOAT32), 3, 4, 0),
        (Precision(accumulate=DType.BFLOAT16), 3, 2, 0),
        (Precision(accumulate=DType.FLOAT32), 1, 4, 2),
        (Precision(reduce=DType.FLOAT32, accumulate=DType.BFLOAT16), 3, 2, 4),
    ],
)
def test_reduce_and_accumulation_types_are_obeyed(
    precision: Precision, micro_batches: int, grads: int, in_flight: int
) -> None:
    found = estimate(1, LAYOUT, precision=precision, micro_batches=micro_batches)
    assert found.nbytes(Purpose.GRADS) == grads * WHOLE
    assert found.nbytes(Purpose.GRADS_IN_FLIGHT) == in_flight * WHOLE


def test_a_wider_type_of_travel_is_not_widened_again() -> None:
    layout = plan_layout([ParamSpec("a", (64,), DType.FLOAT32)], mesh=Mesh.flat(1), max_bucket_numel=1000)
    precision = Precision(reduce=DType.BFLOAT16)
    found = [estimate(1, layout, precision=precision, micro_batches=n) for n in (1, 2)]
    assert [estimate.nbytes(Purpose.GRADS) for estimate in found] == [2 * 64, 4 * 64]


@pytest.mark.parametrize("state_count", [0, 1, 2])
def test_what_is_offloaded_leaves_the_device(state_count: int) -> None:
    kept = estimate(2, LAYOUT, state_count=state_count)
    places = {0: Place.HOST, 1: Place.NVME}
    offload = Offload(places, file_buffers=3, is_remote=False)
    moved = estimate(2, LAYOUT, state_count=state_count, offload=offload)
    states = 4 * (1 + state_count)
    assert moved.peak_nbytes(Place.HOST) == states * 640 // 2 + 3 * 4 * 384 // 2
    assert moved.peak_nbytes(Place.NVME) == states * 384 // 2
    assert moved.peak_nbytes(Place.DEVICE) == kept.total_nbytes - states * (640 + 384) // 2
    assert MemoryRow(Purpose.STAGING, 3 * 4 * 384 // 2, Place.HOST) in moved.rows
    assert moved.resident_nbytes == kept.resident_nbytes


def test_offloaded_master_weights_are_never_the_parameters() -> None:
    layout = plan_layout([ParamSpec("a", (64,), DType.FLOAT32)], mesh=Mesh.flat(2), max_bucket_numel=1000)
    found = estimate(1, layout, offload=Offload({0: Place.HOST}, is_remote=False))
    assert found.nbytes(Purpose.PARAMS) == 4 * 64
    assert found.nbytes(Purpose.MASTER) == found.peak_nbytes(Place.HOST) - 2 * 4 * 32 == 4 * 32


@pytest.mark.parametrize(
    ("stage", "micro_batches", "staged", "rests"), [(1, 1, 2, 0), (1, 2, 4, 0), (2, 1, 0, 2), (2, 2, 0, 4)]
)
@pytest.mark.parametrize("place", [Place.HOST, Place.NVME])
def test_kernels_that_do_not_reach_the_device_need_copies_or_gradients_of_their_own(
    place: Place, stage: int, micro_batches: int, staged: int, rests: int
) -> None:
    near, far = (
        estimate(stage, LAYOUT, micro_batches=micro_batches, offload=Offload({1: place}, is_remote=far))
        for far in (False, True)
    )
    assert near.nbytes(Purpose.STAGING) == 0
    # A bucket in host memory has its own, those in files share one as long as the largest shard, offloaded or not.
    added = 4 * 640 // 2 * (stage == 2 and micro_batches == 2)  # on the device
    assert far.nbytes(Purpose.STAGING) - added == (staged + 2) * (384 if place is Place.HOST else 640) // 2
    moved = rests * 384 // 2
    assert [row.nbytes for row in far.rows if (row.purpose, row.place) == (Purpose.GRADS, Place.HOST)] == [moved][
        : bool(moved)
    ]
    assert far.nbytes(Purpose.GRADS) == near.nbytes(Purpose.GRADS)
    assert far.peak_nbytes(Place.DEVICE) == near.peak_nbytes(Place.DEVICE) - moved + added


@pytest.mark.parametrize(
    ("dtype", "states", "buffers"),
    [(DType.BFLOAT16, Place.NVME, 5), (DType.FLOAT32, Place.NVME, 4), (DType.FLOAT32, Place.DEVICE, 5)],
)
@pytest.mark.parametrize(("most", "longest"), [(1000, 192), (100, 100)])
def test_parameters_in_files_pass_to_a_device_through_pieces(
    dtype: DType, states: Place, buffers: int, most: int, longest: int
) -> None:
    """Those that are their own master weights through buffers of the states' tier."""
    layout = plan_layout(
        [ParamSpec(name, (64 * int(name),), dtype) for name in "26"], mesh=Mesh.flat(2), max_bucket_numel=1
    )
    staged = {}
    for count in (0, 1):
        offload = Offload(
            {0: states, 1: states},
            params={0: Place.NVME, 1: Place.NVME},
            is_remote=True,
            piece_buffers=5 * count,
            state_piece_buffers=4 * count,
            piece_numel=most,
        )
        staged[count] = estimate(3, layout, offload=offload).nbytes(Purpose.STAGING)
    assert staged[1] - staged[0] == buffers * longest * dtype.itemsize


def test_persistent_parameters_stay_whole() -> None:
    params = [ParamSpec("a", (256,), DType.BFLOAT16), ParamSpec("bias", (64,), DType.BFLOAT16)]
    layout = plan_layout(
        params, mesh=Mesh.flat(2), max_bucket_numel=1000, units={"a": "u", "bias": "u"}, persistent={"bias"}
    )
    found = estimate(3, layout, max_gathered_numel=10_000)
    assert found.nbytes(Purpose.PARAMS) == 2 * (256 // 2 + 64)
    assert found.nbytes(Purpose.MASTER) == 4 * (256 + 64) // 2
    assert found.nbytes(Purpose.GATHERED) == 2 * 256


@pytest.mark.parametrize(("bound", "numel"), [(700, 700), (5000, WHOLE + FROZEN)])
def test_gathered_parameters_are_bounded(bound: int, numel: int) -> None:
    found = estimate(3, LAYOUT, max_gathered_numel=bound)
    assert found.nbytes(Purpose.GATHERED) == 2 * numel
    assert estimate(2, LAYOUT, max_gathered_numel=bound).nbytes(Purpose.GATHERED) == 0


@pytest.mark.parametrize(
    ("sizes", "most_in_use", "held"),
    [
        ([64, 64, 64, 64], 2, 128),
        ([64, 320], 1, 320),  # the larger replaces the smaller
        ([64, 320, 320], 2, 640),
        ([320, 64, 64, 320], 3, 448),  # the oldest is finished first, so the large one comes back in time
    ],
)
def test_a_pool_holds_what_it_once_needed(sizes: list[int], most_in_use: int, held: int) -> None:
    params = [ParamSpec(f"p{index}", (size,), DType.FLOAT32) for index, size in enumerate(sizes)]
    layout = plan_layout(params, mesh=Mesh.flat(1), max_bucket_numel=1)
    found = estimate(2, layout, max_in_flight=most_in_use)
    assert found.nbytes(Purpose.GRADS_IN_FLIGHT) == 4 * held


def test_buckets_of_several_types_are_each_counted_in_their_own() -> None:
    layout = plan_layout(
        [ParamSpec("a", (64,), DType.BFLOAT16), ParamSpec("b", (128,), DType.FLOAT32)],
        mesh=Mesh.flat(2),
        max_bucket_numel=1000,
    )
    rows = _rows(estimate(0, layout))
    assert rows[Purpose.PARAMS] == rows[Purpose.GRADS] == 2 * 64 + 4 * 128
    assert rows[Purpose.MASTER] == 4 * 64
    assert rows[Purpose.OPTIM] == 8 * (64 + 128)


def test_one_rank_gathers_nothing() -> None:
    layout = plan_layout([ParamSpec("a", (64,), DType.FLOAT32)], mesh=Mesh.flat(1), max_bucket_numel=1000)
    assert estimate(3, layout).nbytes(Purpose.GATHERED) == 0


def test_a_frozen_model_holds_its_parameters_and_no_more() -> None:
    layout = plan_layout(
        [ParamSpec("a", (64,), DType.FLOAT32, trainable=False)], mesh=Mesh.flat(1), max_bucket_numel=1000
    )
    assert estimate(2, layout).total_nbytes == 64 * 4


@st.composite
def layouts(draw: st.DrawFn) -> ShardLayout:
    dtype = draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT32]))
    sizes = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=8))
    params = [ParamSpec(f"p{index}", (size,), dtype) for index, size in enumerate(sizes)]
    units = {param.fqn: param.fqn for param in params}
    cap = draw(st.integers(1, 3000))
    return plan_layout(params, mesh=Mesh.flat(draw(st.integers(1, 5))), max_bucket_numel=cap, units=units)


@settings(deadline=None)
@given(layouts(), st.sampled_from(STAGES), st.integers(1, 3))
def test_the_formula_of_the_paper_is_the_plan_without_padding(
    layout: ShardLayout, stage: int, micro_batches: int
) -> None:
    zero, dtype, ranks = ZeroPolicy.of_stage(stage), layout.params[0].dtype, layout.world_size
    is_narrow = dtype is DType.BFLOAT16
    gradient = 4 if is_narrow and micro_batches > 1 else dtype.itemsize
    each = {zero.params: 0.0, zero.grads: 0.0, zero.optim: 0.0}
    for placement, nbytes in (
        (zero.params, dtype.itemsize),
        (zero.grads, gradient),
        (zero.optim, 8 + 4 * is_narrow),
    ):
        each[placement] += nbytes
    numel = sum(param.numel for param in layout.params)
    formula = sum(
        nbytes * numel / (ranks if placement is Placement.SHARDED else 1) for placement, nbytes in each.items()
    )
    found = estimate(stage, layout, micro_batches=micro_batches)
    padding = sum(bucket.numel for bucket in layout.buckets) - numel
    most_a_param = 18  # 2 + 4 + 8 + 4 bytes where 16-bit gradients accumulate in 32
    assert -1e-6 <= found.resident_nbytes - formula <= most_a_param * padding + 1e-6


@settings(deadline=None)
@given(layouts())
def test_a_higher_stage_keeps_no_more_than_a_lower(layout: ShardLayout) -> None:
    kept = [estimate(stage, layout).resident_nbytes for stage in STAGES]
    assert kept == sorted(kept, reverse=True)
    assert (len(set(kept)) == 1) == (layout.world_size == 1)
