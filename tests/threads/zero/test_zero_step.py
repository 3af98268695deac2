"""The ZeRO step on numpy buffers: what torch's engine cannot show, and that it needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy_training import GROUP, SHAPES, Views, accumulate, batch, gradients, initial, make_step

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.local.backend import LocalWorld
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType
from polyaccel.errors import InvariantError, PolyaccelError
from polyaccel.offload.device import DeviceTier
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.bucket_plan import plan_step
from polyaccel.zero.plan.layout import plan_layout
from polyaccel.zero.plan.policy import DEFAULT_PRECISION, Precision, ReductionPolicy, StepPolicy, ZeroPolicy
from polyaccel.zero.plan.traffic import exchanges_of, step_traffic
from polyaccel.zero.resources import Communicators, StepResources, Tiers
from polyaccel.zero.update.named_optimizers import slice_optimizer

NUMPY = CpuAccelerator("numpy")
stages = pytest.mark.parametrize("stage", [0, 1, 2])


def test_training_without_torch_equals_plain_numpy():
    here = str(Path(__file__).parents[2] / "support" / "models")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", "import numpy_training; numpy_training.check_without_torch()"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "36 runs agree\n"), done.stderr


def on_numpy(world, fn, *args):
    return run_threads(world, fn, *args, accelerator=NUMPY)


def ones(value):
    return {fqn: np.full(SHAPES[fqn], value, dtype=np.float32) for fqn in reversed(SHAPES)}


PLAIN = {"lr": 1.0}  # SGD: p -= g, so that parameters show their gradients


def applied(communicator, stage, passes, precision=DEFAULT_PRECISION, **reduction):
    """What one update subtracts from each parameter after `passes(step)`."""
    policy = StepPolicy(precision=precision, reduction=ReductionPolicy(**reduction))
    step, params = make_step(communicator, stage, policy, bucket_numel=64, optimizer=slice_optimizer("SGD"))
    before = initial()
    passes(step)
    step.update([PLAIN])
    return {fqn: before[fqn] - params[fqn] for fqn in params}


@stages
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_gradients_in_any_order_on_any_rank(stage, overlap, in_flight):
    """Late, early, twice, missing, and in another order on every rank: the update is the mean all the same."""

    def train(communicator):
        def passes(step):
            for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 3, 1, 0], [1, 4]):  # what is learnt is wrong next time
                chosen = [list(SHAPES)[(index + communicator.rank) % 5] for index in order]
                step.begin_backward(reduce=True)
                for fqn in chosen:
                    step.reducer.add_gradient(fqn, NUMPY.wrap(np.full(SHAPES[fqn], 0.25, dtype=np.float32).reshape(-1)))
                step.reducer.end_backward()

        return applied(communicator, stage, passes, overlap=overlap, max_in_flight=in_flight)

    counts = dict.fromkeys(SHAPES, 0)
    for rank in range(3):
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 3, 1, 0], [1, 4]):
            for index in order:
                counts[list(SHAPES)[(index + rank) % 5]] += 1
    for found in on_numpy(3, train):
        for fqn, count in counts.items():
            np.testing.assert_allclose(found[fqn], 0.25 * count / 3, rtol=1e-5)


@stages
@pytest.mark.parametrize(
    ("policy", "factor"),
    [({}, 1.5), ({"prescale": True}, 1.5), ({"predivide_factor": 4.0}, 1.5), ({"average": False}, 3.0)],
    ids=["average", "prescaled", "predivided", "sum"],
)
def test_how_ranks_are_combined(stage, policy, factor):
    def train(communicator):
        return applied(communicator, stage, lambda step: accumulate(step, ones(communicator.rank + 1.0)), **policy)

    for found in on_numpy(2, train):
        for value in found.values():
            np.testing.assert_allclose(value, factor, rtol=1e-5)


@stages
def test_what_travels_and_what_accumulates_have_types_of_their_own(stage):
    """2048 + 1 is 2048 in float16: lost where that accumulates, kept where float32 does."""

    def train(communicator, **precision):
        def passes(step):
            for value in (2048.0, 1.0, 1.0):
                accumulate(step, ones(value), is_last=False)
            accumulate(step, ones(2.0))

        return applied(communicator, stage, passes, Precision(reduce=DType.FLOAT16, **precision))

    def norm(**precision):
        return float(run_threads(1, lambda c: train(c, **precision), accelerator=NUMPY)[0]["scale"])

    assert norm() == 2050.0
    assert norm(accumulates=True) == 2052.0
    assert norm(accumulate=DType.FLOAT32) == 2052.0


@stages
@pytest.mark.parametrize("policy", [StepPolicy(), StepPolicy(clip_norm=0.5)], ids=["early", "clipped"])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_recorded_step_is_the_planned_one_call_by_call(stage, micros, world, policy):
    """Reductions and published parameters, in order; and what ranks agree on around them, in one call or two."""

    def train(communicator):
        step, params = make_step(communicator, stage, policy, bucket_numel=64, micro_batches=micros)
        assert step_traffic(step.plan).total_numel == sum(each.sent_numel for each in exchanges_of(step.plan))
        for number in range(2):
            before = len(communicator.trace)
            for micro in range(micros):
                accumulate(
                    step, gradients(params, *batch(number, micro, communicator.rank))[1], is_last=micro == micros - 1
                )
            step.update([GROUP])
            calls = [traced.collective for traced in communicator.trace[before:]]
            parts = {"all_reduce": 2 * (world - 1), "reduce_scatter": world - 1, "all_gather": world - 1}
            moved = [
                (call.operation, call.bucket, parts[call.operation] * (call.numel // world))
                for call in calls
                if call.bucket is not None
            ]
            assert moved == [(each.kind, each.bucket, each.sent_numel) for each in exchanges_of(step.plan)]
            order = "".join("x" if c.bucket is None else "p" if c.operation == "all_gather" else "r" for c in calls)
            agreed = "x" * (world > 1)
            reduced = "r" * len(step.plan.trained) * (1 if stage < 2 else micros)
            published = "p" * len(step.plan.trained) * (stage > 0)
            assert order == reduced + agreed + published + agreed * (policy.clip_norm == 0.0)

    on_numpy(world, train)


@stages
def test_an_overflow_is_skipped_by_all_and_named(stage):
    def train(communicator):
        step, params = make_step(communicator, stage, StepPolicy(skip_overflow=True), bucket_numel=64)
        found = ones(1.0)
        if communicator.rank == 1:
            found["b1"].reshape(-1)[40] = np.inf
        accumulate(step, found)
        result = step.update([GROUP], loss_scale=4.0)
        assert (result.applied, result.first_nonfinite_param) == (False, "b1")
        for fqn, value in initial().items():
            np.testing.assert_array_equal(params[fqn], value)
        assert not any(bucket.has_content for bucket in step.reducer.buckets)
        accumulate(step, ones(4.0))
        result = step.update([GROUP], loss_scale=4.0)
        assert (result.applied, result.first_nonfinite_param) == (True, None)
        assert result.grad_norm == pytest.approx(sum(value.size for value in found.values()) ** 0.5)
        assert set(step.steps.values()) == {1}

    on_numpy(2, train)


@stages
def test_deferred_publishing_is_waited_for_bucket_by_bucket(stage):
    def train(communicator):
        step, params = make_step(communicator, stage, StepPolicy(defer_publish=True), bucket_numel=64)
        accumulate(step, ones(1.0))
        step.update([GROUP])
        pending = set(step.params.arriving)
        assert pending == (set() if stage == 0 else {bucket.index for bucket in step.layout.buckets})
        for bucket in step.layout.buckets:
            step.params.wait_all_gather(bucket.index)
            assert all(np.isfinite(params[slot.param.fqn]).all() for slot in bucket.slots)
            pending.discard(bucket.index)
            assert set(step.params.arriving) == pending
        return {fqn: value.copy() for fqn, value in params.items()}

    first, second = on_numpy(2, train)
    for fqn in first:
        np.testing.assert_array_equal(first[fqn], second[fqn])


def test_owned_pieces_cover_every_element_once_and_needed_ones_all_that_is_held():
    def pieces(communicator, stage):
        step, _ = make_step(communicator, stage, StepPolicy(), bucket_numel=64)
        kinds = ("param", "exp_avg", "exp_avg_sq")
        owned = [(slot.param.fqn, kind, start, buffer.numel) for slot, kind, start, buffer in step.local_shards()]
        needed = [(slot.param.fqn, kind, start, buffer.numel) for slot, kind, start, buffer in step.shards_to_load()]
        assert {kind for _, kind, _, _ in owned} == set(kinds)
        assert (
            set(owned) == set(needed)
            if stage
            else set(needed) == {(fqn, kind, 0, int(np.prod(shape))) for fqn, shape in SHAPES.items() for kind in kinds}
        )
        return owned

    for stage in (0, 1, 2):
        covered: dict[tuple[str, str], list[int]] = {}
        for owned in on_numpy(3, pieces, stage):
            for fqn, kind, start, length in owned:
                covered.setdefault((fqn, kind), []).extend(range(start, start + length))
        for (fqn, _), elements in covered.items():
            assert sorted(elements) == list(range(int(np.prod(SHAPES[fqn]))))
        assert len(covered) == 3 * len(SHAPES)


def test_a_failed_pass_must_be_discarded():
    def train(communicator):
        step, _ = make_step(communicator, 2, StepPolicy(), bucket_numel=64)
        step.begin_backward(reduce=True)
        step.reducer.add_gradient("w2", NUMPY.wrap(np.ones(41, dtype=np.float32)))
        step.reducer.abort_backward()
        with pytest.raises(PolyaccelError) as caught:
            step.update([GROUP])
        assert "engine.zero_grad()" in str(caught.value)
        step.discard_gradients()
        accumulate(step, ones(1.0))
        assert step.update([GROUP]).applied

    on_numpy(1, train)


def test_a_layout_for_other_ranks_is_refused():
    communicator = LocalWorld(1, NUMPY).communicators[0]
    layout = plan_layout([], mesh=Mesh.flat(2), max_bucket_numel=1)
    parts = StepResources(NUMPY, Communicators.plain(communicator), Tiers.around(DeviceTier()))
    with pytest.raises(InvariantError) as caught:
        ZeroEngine(plan_step(layout, ZeroPolicy.of_stage(0), StepPolicy()), parts, Views(communicator), None, [])
    assert caught.value.value == 2
