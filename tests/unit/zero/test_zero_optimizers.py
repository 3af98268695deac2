"""Optimizers on slices: which elements an update touches, what it reads from its group, and LAMB's ratio."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.local.backend import LocalWorld
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.offload.device import DeviceTier
from polyaccel.offload.tier import TierOptions
from polyaccel.zero.buckets.rounding import WeightRounding
from polyaccel.zero.plan.layout import Slice, plan_layout
from polyaccel.zero.update.named_optimizers import slice_optimizer
from polyaccel.zero.update.optimizer_step import find_runs
from polyaccel.zero.update.optimizers import Shard

NUMPY = CpuAccelerator("numpy")
SIZES = st.lists(st.integers(0, 90), min_size=1, max_size=6)
ALL = [
    ("Adam", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    ("Lion", {"lr": 0.1, "betas": (0.9, 0.99)}),
    ("Lamb", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}),
]


def device_tier() -> DeviceTier:
    tier = DeviceTier()
    tier.open(NUMPY, NUMPY, TierOptions(run_id="unit", rank=0))
    return tier


def make_shard(sizes, world, rank, optimizer, group, dtype=DType.FLOAT32):
    """Rank `rank`'s shard of one bucket with parameters p0, p1, ... of these sizes; master 1, gradient 0.5."""
    specs = [ParamSpec(f"p{index}", (size,), dtype) for index, size in enumerate(sizes)]
    (bucket,) = plan_layout(specs, mesh=Mesh.flat(world), max_bucket_numel=10**6).buckets
    buffers = [NUMPY.allocate(bucket.shard_numel, DType.FLOAT32) for _ in range(2)]
    out = None if dtype is DType.FLOAT32 else NUMPY.allocate(bucket.shard_numel, dtype)
    shard = Shard(bucket, device_tier(), buffers[0], out, bucket.slices(rank), grad=buffers[1])
    buffers[0].fill(1.0)
    buffers[1].fill(0.5)
    for name in optimizer.state_names:
        shard.allocate_state(name, DType.FLOAT32)
    optimizer.initialise_states(shard.states, group, shard.bucket.slots[0].param)
    return shard


def runs_of(shard, touched, steps, origin=0, is_stochastic=False):
    rounding = WeightRounding(steps, NUMPY, is_stochastic=is_stochastic)
    return tuple(find_runs(shard, origin, frozenset(touched), steps, rounding))


def run_update(shard, optimizer, group):
    (updated,) = optimizer.update([shard], [group], 1.0, LocalWorld(1, NUMPY).communicators[0])
    assert updated is shard


def elements(piece: Slice) -> range:
    return range(piece.shard_offset, piece.shard_offset + piece.length)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, world=st.integers(1, 4), data=st.data())
def test_runs_hold_every_touched_slice_whole_and_no_other(sizes, world, data):
    """Stretches do not overlap, start where a slot starts, and join only what has had as many updates."""
    rank = data.draw(st.integers(0, world - 1))
    touched = frozenset(name for name in (f"p{i}" for i in range(len(sizes))) if data.draw(st.booleans()))
    steps = {f"p{index}": data.draw(st.integers(1, 2)) for index in range(len(sizes))}
    shard = make_shard(sizes, world, rank, slice_optimizer("SGD"), {"lr": 1.0})
    low, _ = shard.bucket.shard_bounds(rank)
    runs = runs_of(shard, touched, steps, low)

    covered = [element for run in runs for element in range(run.offset, run.offset + run.numel)]
    assert covered == sorted(set(covered))
    assert not covered or (covered[0] >= 0 and covered[-1] < shard.master.numel)
    assert {run.offset + low for run in runs} <= {low, *(slot.offset for slot in shard.bucket.slots)}
    step_of = {element: run.step for run in runs for element in range(run.offset, run.offset + run.numel)}
    for piece in shard.slices:
        here = {step_of.get(element) for element in elements(piece)}
        assert here == ({steps[piece.fqn]} if piece.fqn in touched else {None})
    shard.runs = runs
    assert {piece.fqn for piece in shard.slices if shard.updates(piece)} == touched & {p.fqn for p in shard.slices}


@pytest.mark.parametrize("rank", range(3))
def test_a_shard_whose_parameters_are_all_alike_is_one_run_with_its_padding(rank):
    shard = make_shard([40, 50, 60], 3, rank, slice_optimizer("SGD"), {"lr": 1.0})
    low, _ = shard.bucket.shard_bounds(rank)
    steps = dict.fromkeys(["p0", "p1", "p2"], 5)
    (run,) = runs_of(shard, steps, steps, low)
    assert (run.offset, run.numel, run.step) == (0, shard.master.numel, 5)
    assert runs_of(shard, steps, steps, low, is_stochastic=True) == (run,)  # float32 is never rounded: the long way


@pytest.mark.parametrize(("kind", "group"), ALL, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
def test_an_update_leaves_untouched_parameters_and_their_states_alone(kind, group, dtype):
    optimizer = slice_optimizer(kind)
    shard = make_shard([40, 50, 60], 1, 0, optimizer, group, dtype)
    before = {name: state.raw.copy() for name, state in shard.states.items()}
    shard.runs = runs_of(shard, {"p0", "p2"}, {"p0": 1, "p1": 7, "p2": 1})
    run_update(shard, optimizer, {**group, "weight_decay": 0.1})
    for piece in shard.slices:
        window = slice(piece.shard_offset, piece.shard_offset + piece.length)
        moved = piece.fqn != "p1"
        assert (shard.master.raw[window] != 1.0).all() == moved
        for name, state in shard.states.items():
            assert (state.raw[window] != before[name][window]).all() == moved, name
        if shard.out is not None:
            wanted = shard.master.raw[window].astype(np.float16) if moved else np.zeros(piece.length)
            np.testing.assert_array_equal(shard.out.raw[window], wanted)


@pytest.mark.parametrize(("kind", "group"), ALL[:4], ids=lambda value: value if isinstance(value, str) else "")
def test_the_gradient_scale_is_a_factor_of_the_gradient(kind, group):
    masters = []
    for factor in (1.0, 0.25):
        optimizer = slice_optimizer(kind)
        shard = make_shard([40], 1, 0, optimizer, group)
        shard.grad.fill(0.5 / factor)
        shard.runs = runs_of(shard, {"p0"}, {"p0": 1})
        list(optimizer.update([shard], [group], factor, LocalWorld(1, NUMPY).communicators[0]))
        masters.append(shard.master.raw[:40].copy())
    np.testing.assert_array_equal(masters[0], masters[1])


def test_the_group_is_read_anew_at_every_update():
    """Schedules write into the mapping; nothing of it may be remembered."""
    group = {"lr": 0.5}
    optimizer = slice_optimizer("SGD")
    shard = make_shard([4], 1, 0, optimizer, group)
    shard.runs = runs_of(shard, {"p0"}, {"p0": 1})
    for lr, wanted in ((0.5, 0.75), (0.25, 0.625), (0.0, 0.625)):
        group["lr"] = lr
        shard.grad.fill(0.5)
        run_update(shard, optimizer, group)
        np.testing.assert_array_equal(shard.master.raw[:4], wanted)


@pytest.mark.parametrize(
    ("weight", "bounds", "ratio"),
    [
        (3.0, {}, 3.0),  # the direction of Adam's first step is 1 everywhere, so the ratio is the weight
        (100.0, {}, 10.0),
        (1e-6, {}, 0.01),
        (3.0, {"max_coeff": 2.0}, 2.0),
        (3.0, {"min_coeff": 4.0}, 4.0),
        (0.0, {}, 1.0),
    ],
)
def test_the_trust_ratio_of_lamb_and_its_bounds(weight, bounds, ratio):
    group = {"lr": 0.125, "betas": (0.9, 0.99), "eps": 0.0, **bounds}
    shard = make_shard([40], 1, 0, slice_optimizer("Lamb"), group)
    shard.master.raw[:40] = weight
    shard.runs = runs_of(shard, {"p0"}, {"p0": 1})
    run_update(shard, slice_optimizer("Lamb"), group)
    np.testing.assert_allclose(shard.master.raw[:40], weight - 0.125 * ratio, rtol=1e-5, atol=1e-6)


def test_lamb_without_a_direction_does_not_divide_by_zero():
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    shard = make_shard([40], 1, 0, slice_optimizer("Lamb"), group)
    shard.grad.fill(0.0)
    shard.runs = runs_of(shard, {"p0"}, {"p0": 1})
    run_update(shard, slice_optimizer("Lamb"), group)
    np.testing.assert_array_equal(shard.master.raw[:40], 1.0)


@pytest.mark.parametrize(("kind", "group"), ALL[:4], ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_rounded_stochastically_depend_on_their_parameter_only(kind, group, world):
    """However they are cut over ranks, they are what the same master weights are rounded to by hand."""
    sizes, steps = [37, 130, 1, 60], {"p0": 1, "p1": 3, "p2": 1, "p3": 1}
    rounding = WeightRounding(steps, NUMPY, is_stochastic=True)
    found = {f"p{index}": np.full(size, np.nan) for index, size in enumerate(sizes)}
    for rank in range(world):
        optimizer = slice_optimizer(kind)
        shard = make_shard(sizes, world, rank, optimizer, group, DType.FLOAT16)
        low, _ = shard.bucket.shard_bounds(rank)
        for piece in shard.slices:
            start = np.random.default_rng(piece.start + 1000 * int(piece.fqn[1]))
            shard.master.raw[piece.shard_offset : piece.shard_offset + piece.length] = start.normal(size=piece.length)
        shard.runs = runs_of(shard, steps, steps, low, is_stochastic=True)
        run_update(shard, optimizer, group)
        for piece in shard.slices:
            window = (piece.shard_offset, piece.length)
            again = NUMPY.allocate(piece.length, DType.FLOAT16)
            param = ParamSpec(piece.fqn, (sizes[int(piece.fqn[1])],), DType.FLOAT16)
            rounding.write(shard.master.view(*window), again, param, piece.start)
            out = shard.out.view(*window).raw
            np.testing.assert_array_equal(out, again.raw)
            found[piece.fqn][piece.start : piece.start + piece.length] = out
            assert (out != shard.master.view(*window).raw.astype(np.float16)).any() or piece.length < 20
    assert all(np.isfinite(values).all() for values in found.values())


def test_who_was_never_updated_is_rounded_to_nearest():
    param = ParamSpec("p", (3,), DType.FLOAT16)
    steps = {"p": 0}
    rounding = WeightRounding(steps, NUMPY, is_stochastic=True)
    assert rounding.make_rounding(param, 0) is None
    steps["p"] = 1
    first = rounding.make_rounding(param, 5)
    assert first is not None
    assert first.start == 5
    steps["p"] = 2
    second = rounding.make_rounding(param, 5)
    assert second is not None
    assert second.key != first.key
    assert rounding.make_rounding(ParamSpec("p", (3,), DType.FLOAT32), 0) is None
    assert WeightRounding(steps, NUMPY, is_stochastic=False).make_rounding(param, 0) is None
