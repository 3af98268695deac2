"""Train a module of Flax (linen) from a TrainState and a loss function, as Flax's own examples have them.

polyaccel run --ranks 2 examples/linen/train.py
"""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import polyaccel

CONFIG = {"train_batch_size": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(64)(x)))


def loss_fn(params, batch, rng):
    return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
model = Model()
params = model.init(jax.random.key(0), np.ones((1, 16), np.float32))["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))
engine = polyaccel.initialize(model=loss_fn, params=state, config=CONFIG)
ranks = engine.communicator
draw = np.random.default_rng(ranks.rank)
for _ in range(steps):
    x = draw.standard_normal((32 // ranks.world_size, 16), np.float32)
    loss = engine.train_batch({"x": x, "y": x.sum(1, keepdims=True)})
if ranks.rank == 0:
    print(f"step {engine.global_steps}: loss {float(loss):.4f}")
engine.destroy()
