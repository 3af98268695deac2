"""A script for tests: ranks of a launcher that train together in native mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import polyaccel
import polyaccel.jax

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 2},
    "jax": {"execution": "native"},
}

polyaccel.jax.init_distributed(config=CONFIG)
params = {"w": jnp.zeros((3, 2))}
engine = polyaccel.initialize(
    model=lambda params, batch, rng: jnp.square(batch @ params["w"] - 1.0).mean(), params=params, config=CONFIG
)
rank, world_size = engine.communicator.rank, engine.communicator.world_size
assert (jax.process_index(), jax.process_count()) == (rank, world_size) != (0, 1)
for step in range(5):
    engine.train_batch(jax.random.normal(jax.random.key(10 * step + rank), (4, 3)))
total = engine.communicator.all_gather_object([float(value) for value in engine.params["w"].reshape(-1)])
assert all(values == total[0] for values in total), total
assert total[0][0] != 0.0
print(f"trained: rank {rank} of {world_size}", flush=True)
