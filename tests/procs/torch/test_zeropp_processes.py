"""ZeRO++ where ranks are processes: all of it at once, as threads have it, bit for bit."""

from __future__ import annotations

import pytest
from parity_models import assert_bitwise, make_config, train, train_on_threads
from stage3_models import CASES

ZERO = {
    "reduce_bucket_size": 64,
    "stage3_param_persistence_threshold": 10,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}


def train_here(communicator, config):
    """One rank's run, inside its process."""
    build, loss = CASES["gpt"]
    return train(communicator, build(), config, 2, loss)


@pytest.mark.parametrize(("world", "near"), [(3, 1), (4, 2)])
def test_processes_equal_threads_bitwise(rank_pool, world, near):
    config = make_config(3, accumulation=2, gradient_clipping=0.5, zero={**ZERO, "zero_hpz_partition_size": near})
    build, loss = CASES["gpt"]
    threads = train_on_threads(world, config, 2, build=build, loss_fn=loss)
    for run in rank_pool(world).run(train_here, config):
        assert_bitwise(run.params, threads.params)
        assert run.norms == threads.norms
