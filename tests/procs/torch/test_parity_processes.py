"""A sample of the parity suite where ranks are processes and gloo carries what they exchange: plain torch's numbers."""

from __future__ import annotations

import pytest
from parity_models import (
    SMALL_BUCKET,
    assert_bitwise,
    assert_close,
    make_config,
    parity_model,
    relative_distance,
    snapshot,
    train,
    train_plainly,
)
from torch import bfloat16

STEPS = 2
CLIP = 0.5


def train_here(communicator, config, steps):
    """One rank's run, inside its process."""
    return train(communicator, parity_model(), config, steps)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_stages_agree_over_gloo(rank_pool, world, accumulation):
    plain = train_plainly(world, STEPS, accumulation=accumulation, clip=CLIP)
    zero = {"reduce_bucket_size": SMALL_BUCKET}
    for stage in (0, 1, 2):
        for overlap in ({}, {"overlap_comm": False}, {"overlap_param_gather": True}):
            config = make_config(stage, accumulation=accumulation, gradient_clipping=CLIP, zero={**zero, **overlap})
            runs = rank_pool(world).run(train_here, config, STEPS)
            for run in runs:
                assert_bitwise(run.params, runs[0].params)
                assert run.norms == runs[0].norms
            assert_close(runs[0].params, plain.params)
            assert runs[0].norms == pytest.approx(plain.norms, rel=1e-5)
            assert runs[0].losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
def test_bfloat16_over_gloo(rank_pool, stage):
    config = make_config(stage, accumulation=3, bf16={"enabled": True}, zero={"reduce_bucket_size": SMALL_BUCKET})
    runs = rank_pool(3).run(train_here, config, STEPS)
    plain = train_plainly(3, STEPS, accumulation=3, param_dtype=bfloat16)
    for run in runs:
        assert_bitwise(run.params, runs[0].params)
    assert relative_distance(runs[0].params, plain.params, snapshot(parity_model())) < 0.03
