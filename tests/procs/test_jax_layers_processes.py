"""A model of torch with layers of JAX where ranks are processes, beside the same model of torch alone on threads."""

from __future__ import annotations

import numpy as np
import pytest
from parity_models import make_config, train, train_on_threads

pytest.importorskip("jax")

from jax_layer_models import MIXED, TORCH

STEPS = 20
SHARDED = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}


def train_here(communicator, config):
    """One rank's losses, inside its process."""
    case = MIXED[None]
    return train(communicator, case.build(), config, STEPS, case.loss).losses


@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_train_as_torch_does(rank_pool, stage):
    config = make_config(stage, gradient_clipping=0.5, zero=SHARDED)
    wanted = train_on_threads(2, config, STEPS, build=TORCH.build, loss_fn=TORCH.loss).losses
    np.testing.assert_allclose(rank_pool(2).run(train_here, config)[0], wanted, rtol=1e-5)
