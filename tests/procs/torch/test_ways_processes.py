"""Ranks that are processes and take different ways at stage 3: over gloo, and shared memory that is no one memory."""

from __future__ import annotations

import pytest
from parity_models import assert_bitwise, assert_close, make_config, train, train_plainly
from stage3_models import seeded
from way_models import CASES, loss_of, one_group

STEPS = 5


def train_here(communicator, name, config):
    """One rank's run, inside its process."""
    case = CASES[name]
    return train(communicator, seeded(case.build)(), config, STEPS, loss_of(case), groups=one_group)


@pytest.mark.parametrize("name", ["layer drop", "images on some ranks"])
def test_processes_train_like_plain_torch(rank_pool, name):
    config = make_config(3, accumulation=2, zero={"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0})
    first, *others = rank_pool(2).run(train_here, name, config)
    for run in others:
        assert_bitwise(run.params, first.params)
    plain = train_plainly(
        2, STEPS, accumulation=2, build=seeded(CASES[name].build), loss_fn=loss_of(CASES[name]), groups=one_group
    )
    assert_close(first.params, plain.params)
