"""Models of both frameworks where ranks are processes, beside the same models of torch alone on threads."""

from __future__ import annotations

import numpy as np
import pytest
from parity_models import make_config, train, train_on_threads

pytest.importorskip("jax")

from jax_layer_models import MIXED, TORCH, TorchOutside
from jax_models import make_config as make_jax_config
from jax_models import train_torch
from jax_sharded_models import ZERO, train_sharded

from polyaccel.testkit.ranks.threads import run_threads

STEPS = 10
SHARDED = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}


def train_here(communicator, config):
    """One rank's losses, inside its process."""
    case = MIXED[None]
    return train(communicator, case.build(), config, STEPS, case.loss).losses


@pytest.mark.timeout(500)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_train_as_torch_does(rank_pool, stage):
    config = make_config(stage, gradient_clipping=0.5, zero=SHARDED)
    wanted = train_on_threads(2, config, STEPS, build=TORCH.build, loss_fn=TORCH.loss).losses
    np.testing.assert_allclose(rank_pool(2).run(train_here, config, timeout_s=240.0)[0], wanted, rtol=1e-5)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("world", "accumulation"), [(2, 3), (3, 1)])
def test_a_module_of_torch_in_a_function_of_jax_at_stage_3(rank_pool, world, accumulation):
    config = make_jax_config(3, accumulation=accumulation, zero=ZERO)
    models = [TorchOutside.build() for _ in range(world)]
    wanted = run_threads(world, lambda ranks: train_torch(ranks, models[ranks.rank], config, STEPS))[0]
    found = rank_pool(world).run(train_sharded, "mixed", config, STEPS, timeout_s=240.0)
    assert found[0].losses[:-1] == pytest.approx(wanted.losses, rel=1e-5)
    for run in found[1:]:
        assert run.norms == found[0].norms
