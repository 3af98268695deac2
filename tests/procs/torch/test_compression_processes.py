"""Compressed layers where ranks are processes and gloo carries what they exchange."""

from __future__ import annotations

import pytest
import torch
from compressed_models import CONFIG
from parity_models import assert_close, batch, make_config, parity_model, train

import polyaccel


def train_here(communicator, config, steps):
    return train(communicator, parity_model(), config, steps)


def compress_and_clean(communicator, config, folder):
    """Train, save, load into another engine at another stage, and export."""
    model = parity_model()
    engine = polyaccel.initialize(model=model, config=config)[0]
    for step in range(4):
        engine.backward(engine(*batch(step, 0, communicator.rank)))
        engine.step()
    engine.save_checkpoint(folder)
    other = parity_model()
    second = polyaccel.initialize(model=other, config=config | {"zero_optimization": {"stage": 1}})[0]
    second.load_checkpoint(folder)
    same = all(
        torch.equal(one.float(), two.float())
        for (name, one), (_, two) in zip(engine.module.named_buffers(), second.module.named_buffers(), strict=True)
        if "mask" in name
    )
    engine.destroy()
    second.destroy()
    polyaccel.redundancy_clean(model, config)
    polyaccel.redundancy_clean(other, config)
    return same, {name: one.detach() for name, one in model.state_dict().items()}, other.state_dict()


def test_stages_agree_over_gloo(rank_pool):
    runs = {}
    for stage in (0, 3):
        zero = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0} if stage else {}
        config = make_config(stage, compression_training=CONFIG, zero=zero)
        runs[stage] = rank_pool(2).run(train_here, config, 5)
    assert runs[3][0].losses == pytest.approx(runs[0][0].losses, rel=1e-6)
    assert_close(runs[3][0].params, runs[0][0].params, 1e-6)


def test_a_checkpoint_is_exported_as_the_run_that_saved_it(rank_pool, tmp_path):
    config = make_config(3, compression_training=CONFIG, zero={"stage3_param_persistence_threshold": 0})
    for same, mine, other in rank_pool(2).run(compress_and_clean, config, str(tmp_path)):
        assert same
        assert mine["wide.weight"].shape == (13, 6)
        assert_close(mine, other, 1e-6)
