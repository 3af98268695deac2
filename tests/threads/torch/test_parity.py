"""Stages 0, 1 and 2 against each other, bitwise where the design promises it, and against one plain torch process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from pairwise import chosen, combinations
from parity_models import (
    SMALL_BUCKET,
    assert_bitwise,
    assert_close,
    batch,
    make_config,
    on_threads,
    parity_model,
    relative_distance,
    snapshot,
    train_on_threads,
    train_plainly,
)
from stage3_models import assert_same_run

import polyaccel

STEPS = 2
WORLDS = (1, 2, 3)
CLIP = 0.5  # well below the norms of this model, which are about 2
BF16 = {"bf16": {"enabled": True}}


@combinations(world=WORLDS, accumulation=[1, 3], clip=[0.0, CLIP], precision=["fp32", "bf16"])
def test_stages_agree_with_each_other_and_with_plain_torch(world, accumulation, clip, precision):
    changes = {"gradient_clipping": clip, **(BF16 if precision == "bf16" else {})}

    def run_of(stage, bucket, overlap):
        zero = {"reduce_bucket_size": bucket, "overlap_comm": overlap}
        config = make_config(stage, accumulation=accumulation, zero=zero, **changes)
        return train_on_threads(world, config, STEPS)

    reference = {stage: run_of(stage, SMALL_BUCKET, True) for stage in (0, 1, 2)}
    for stage, bucket, overlap in chosen((0, 1, 2), (SMALL_BUCKET, 10**9), (True, False)):
        if (bucket, overlap) != (SMALL_BUCKET, True):
            assert_same_run(run_of(stage, bucket, overlap), reference[stage])
    assert_same_run(reference[1], reference[0])

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    plain = train_plainly(world, STEPS, accumulation=accumulation, clip=clip, param_dtype=dtype)
    start = snapshot(parity_model())
    if accumulation == 1:
        assert_same_run(reference[2], reference[0])
    for stage in (0, 2):
        run = reference[stage]
        if precision == "fp32":
            assert_close(run.params, plain.params)
            assert run.norms == pytest.approx(plain.norms, rel=1e-5)
            assert run.losses == pytest.approx(plain.losses, rel=1e-5)
        else:
            assert relative_distance(run.params, plain.params, start) < 0.03
            assert run.norms == pytest.approx(plain.norms, rel=0.02)
            assert run.losses == pytest.approx(plain.losses, rel=0.01)
    assert_bitwise({"unused": reference[0].params["unused"]}, {"unused": start["unused"].to(dtype)})


@combinations(world=WORLDS, stage=[1, 2], precision=[pytest.param({}, id="fp32"), pytest.param(BF16, id="bf16")])
def test_gathering_parameters_in_the_next_forward_changes_nothing(world, stage, precision):
    bits = {"reduce_bucket_size": SMALL_BUCKET}
    runs = [
        train_on_threads(
            world,
            make_config(stage, accumulation=3, zero={**bits, "overlap_param_gather": deferred}, **precision),
            STEPS,
        )
        for deferred in (False, True)
    ]
    assert_same_run(runs[1], runs[0])


@pytest.mark.parametrize("scaling", [{"prescale_gradients": True}, {"gradient_predivide_factor": 1.7}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_where_gradients_are_divided_changes_only_rounding(stage, scaling):
    config = make_config(stage, accumulation=3, zero={"reduce_bucket_size": SMALL_BUCKET}, **scaling)
    assert_close(train_on_threads(3, config, STEPS).params, train_plainly(3, STEPS, accumulation=3).params)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_summed_gradients_are_world_size_times_the_averaged_ones(stage):
    run = train_on_threads(3, make_config(stage, gradient_allreduce_op="sum", gradient_clipping=CLIP), STEPS)
    plain = train_plainly(3, STEPS, gradient_factor=3.0, clip=CLIP)
    assert_close(run.params, plain.params)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)


def test_reducing_in_float32_is_nearer_to_float32_than_reducing_in_bfloat16():
    """What travels as bf16 is rounded on every rank and in every sum; norms show it without AdamW's normalisation."""
    exact = train_plainly(3, 1, param_dtype=torch.bfloat16).norms[0]
    norms = {}
    for travels in ("bf16", "fp32"):
        found = {
            train_on_threads(3, make_config(stage, communication_data_type=travels, **BF16), 1).norms[0]
            for stage in (0, 1, 2)
        }
        (norms[travels],) = found
    assert abs(norms["fp32"] - exact) < 1e-6 * exact
    assert 1e-6 * exact < abs(norms["bf16"] - exact) < 0.01 * exact


@pytest.mark.parametrize("world", [2, 3])
def test_accumulation_without_sync_equals_replicated_accumulation_bitwise(world):
    """Gradients that accumulate before one reduction are the same sum at every stage."""

    def unsynchronised(communicator, model, config):
        engine, *_ = polyaccel.initialize(model=model, config=config)
        for step in range(STEPS):
            for micro in range(3):
                with engine.no_sync() if micro < 2 else nullcontext():
                    engine.backward(engine(*batch(step, micro, communicator.rank)))
                engine.step()
        assert engine.global_steps == STEPS
        return snapshot(engine.module)

    results = [
        on_threads(world, unsynchronised, parity_model, make_config(stage, accumulation=3)) for stage in (0, 1, 2)
    ]
    for ranks in results:
        for params in ranks:
            assert_bitwise(params, results[0][0])
