"""A program for tests: trains in native mode on the accelerator that DS_ACCELERATOR names, and prints what that was.

Views mode needs memory that can be written to, and says so.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import polyaccel
from polyaccel.errors import ConfigError

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 2},
}


def loss(params, batch, rng):
    x, y = batch
    return jax.numpy.square(x @ params["w"] - y).mean()


params = {"w": np.zeros((3, 2), np.float32)}
with pytest.raises(ConfigError) as caught:
    polyaccel.initialize(model=loss, params=params, config=CONFIG)
assert caught.value.problems[0].key == "jax.execution"
engine = polyaccel.initialize(model=loss, params=params, config={**CONFIG, "jax": {"execution": "native"}})
x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
losses = [float(engine.train_batch((x, x[:, :2]))) for _ in range(40)]
assert losses[-1] < 0.1 * losses[0], losses
devices = {device for bucket in engine.zero.params.held.params for device in bucket.devices()}
assert devices == set(jax.devices(engine.accelerator.name)), devices
print(type(engine.accelerator).__name__, engine.accelerator.name, len(devices), "trained")
