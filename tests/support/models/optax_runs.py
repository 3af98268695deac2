"""Transformations of optax under engines and in plain optax, on a small function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_models import leaves

import polyaccel

STEPS = 4


def start():
    random = np.random.default_rng(0)
    return {
        "emb": {"kernel": random.standard_normal((3, 5), dtype=np.float32)},
        "norm": {"scale": random.standard_normal(5, dtype=np.float32)},
        "out": {
            "kernel": random.standard_normal((5, 2), dtype=np.float32),
            "bias": random.standard_normal(2, dtype=np.float32),
            "gain": np.float32(1.5),
        },
    }


def loss(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["emb"]["kernel"]) * params["norm"]["scale"]
    found = hidden @ params["out"]["kernel"] * params["out"]["gain"] + params["out"]["bias"]
    return jnp.square(found - batch["y"]).mean()


def data(at, rank):
    random = np.random.default_rng([at, rank])
    return {
        "x": random.standard_normal((4, 3), dtype=np.float32),
        "y": random.standard_normal((4, 2), dtype=np.float32),
    }


def batches(world, at):
    return [data(at, rank) for rank in range(world)]


def plainly(make, worlds, *, steps=STEPS, **extra):
    """Train plainly with half of the steps on the batches of so many ranks, and half on those of others; return the
    parameters by name. `extra` has functions of the loss that make extra arguments."""
    transformation = make()
    params = jax.tree.map(jnp.asarray, start())
    state = transformation.init(params)

    @jax.jit
    def step(params, state, each):
        losses, grads = zip(*each, strict=True)
        given = {name: of(sum(losses) / len(losses)) for name, of in extra.items()}
        mean = jax.tree.map(lambda *of_ranks: sum(of_ranks) / len(of_ranks), *grads)
        updates, state = transformation.update(mean, state, params, **given)
        return optax.apply_updates(params, updates), state

    for at in range(steps):
        world = worlds[at // (steps // len(worlds))]
        each = [jax.value_and_grad(loss)(params, batch, None) for batch in batches(world, at)]
        params, state = step(params, state, each)
    return leaves(params)


def engine_at(stage, transformation, **changes):
    """`stage` is a number for views mode, or a text: "native 3"."""
    zero = {"stage": int(str(stage)[-1]), "reduce_bucket_size": 12, "param_persistence_threshold": 0}
    changes |= {"jax": {"execution": "native"}} if isinstance(stage, str) else {}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, **changes}
    return polyaccel.initialize(model=loss, params=start(), optimizer=transformation, config=config)


def train_half(ranks, make, stage, folder, half):
    """Train by one half of the steps from the checkpoint of the first, or save that; return the parameters by name."""
    engine = engine_at(stage, make())
    if half:
        engine.load_checkpoint(str(folder))
    for at in range(half * STEPS // 2, (half + 1) * STEPS // 2):
        engine.train_batch(data(at, ranks.rank))
    if not half:
        engine.save_checkpoint(str(folder))
    found = leaves(engine.params)
    engine.destroy()
    return found
