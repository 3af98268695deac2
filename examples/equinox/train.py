"""Train a module of Equinox: the engine shards its parameters and runs its optimizer.

polyaccel run --ranks 2 examples/equinox/train.py
"""

import sys

import equinox as eqx
import jax
import numpy as np

import polyaccel

CONFIG = {
    "train_batch_size": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


class Model(eqx.Module):
    layers: eqx.nn.MLP

    def __call__(self, x, y):
        return ((jax.vmap(self.layers)(x) - y) ** 2).mean()


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
engine = polyaccel.initialize(model=Model(eqx.nn.MLP(16, 1, 64, 1, key=jax.random.key(0))), config=CONFIG)
ranks = engine.communicator
draw = np.random.default_rng(ranks.rank)
for _ in range(steps):
    x = draw.standard_normal((32 // ranks.world_size, 16), np.float32)
    loss = engine.train_batch((x, x.sum(1, keepdims=True)))
if ranks.rank == 0:
    print(f"step {engine.global_steps}: loss {float(loss):.4f}")
engine.destroy()
