"""Training loops whose gradients pass through the hands of the script, on an engine and in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_models import leaves

import polyaccel
from polyaccel.jax import scan_units, unit

ROWS = 4
"""Samples of a rank's micro-batch."""
RADIUS = 0.05
CONFIG = {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.5}
RECIPE = {"learning_rate": 1e-2, "weight_decay": 0.1}


def params() -> Any:
    """Weights in and out of a stack of two layers, a bias of an odd size, and a table of integers."""
    drawn = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return drawn.standard_normal(shape).astype(np.float32) * 0.3

    return {
        "in": {"w": weights(5, 7), "b": np.zeros(7, np.float32)},
        "order": np.arange(5, dtype=np.int32)[::-1].copy(),
        "out": weights(7, 3),
        "stack": {"w": weights(2, 7, 7)},
    }


def batch(step: int, rank: int) -> Any:
    """A rank's samples of a step."""
    drawn = np.random.default_rng([step, rank])
    x = drawn.standard_normal((ROWS, 5)).astype(np.float32)
    return {"x": x, "y": np.cumsum(x, 1)[:, :3]}


def loss_fn(p: Any, batch: Any, rng: Any) -> Any:
    """(loss, auxiliary output), with units that stage 3 gathers."""
    x = jnp.take(batch["x"], p["order"], axis=1)
    x = unit(lambda layer, x: jnp.tanh(x @ layer["w"] + layer["b"]))(p["in"], x)
    x = scan_units(lambda layer, x: x + jnp.tanh(x @ layer["w"]), x, p["stack"])
    return jnp.mean((x @ p["out"] - batch["y"]) ** 2), x.mean()


def perturbed(params: Any, gradients: Any) -> Any:
    """The parameters at a distance of RADIUS along the gradient: SAM, arXiv 2010.01412, eq. 2."""
    norm = optax.tree.norm([one for one in jax.tree.leaves(gradients) if jnp.issubdtype(one.dtype, jnp.floating)])
    return jax.tree.map(
        lambda w, g: w + RADIUS * g / norm if jnp.issubdtype(w.dtype, jnp.floating) else w, params, gradients
    )


def samples(step: int, ranks: Sequence[int]) -> Any:
    """The samples of several ranks."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *(batch(step, rank) for rank in ranks))


def train(
    communicator: Any, stage: int, loop: str, steps: int, config: Any, devices: int = 1
) -> tuple[list[float], Any, int, int]:
    """(losses, parameters, steps, micro-batches) of a process after the `loop` "sam", "own" or "train_batch"."""
    process = communicator.rank
    config = {**CONFIG, "zero_optimization": {"stage": stage, "reduce_bucket_size": 40}, **config}
    stacked = ["stack"] if stage == 3 else []
    engine = polyaccel.initialize(
        model=loss_fn, params=params(), optimizer=optax.adamw(**RECIPE), config=config, stacked=stacked
    )
    losses = []
    for step in range(steps):
        own = samples(step, range(process * devices, (process + 1) * devices))
        if loop == "train_batch":
            losses.append(float(engine.train_batch(own)))
            continue
        loss, gradients = engine.value_and_grad(own)
        if loop == "sam":
            _, gradients = engine.value_and_grad(own, perturbed(engine.params, gradients))
        engine.apply_gradients(gradients, loss)
        losses.append(float(loss))
    found = losses, leaves(engine.params), engine.global_steps, engine.micro_steps
    engine.destroy()
    return found


def check_sam(runs: Any, world: int, steps: int) -> None:
    """Assert that runs of "sam" equal plain JAX."""
    losses, wanted = plain_sam(world, steps)
    for found, weights, *counts in runs:
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        assert counts == [steps, steps]
        for name, value in wanted.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def plain_sam(world: int, steps: int) -> tuple[list[float], Any]:
    """(losses, parameters) of SAM in plain JAX on the samples of all ranks."""
    tx = optax.chain(optax.clip_by_global_norm(CONFIG["gradient_clipping"]), optax.adamw(**RECIPE))
    given = jax.tree.map(jnp.asarray, params())
    order = given.pop("order")

    def loss_of(own: Any, batch: Any) -> Any:
        return loss_fn({**own, "order": order}, batch, None)[0]

    state = tx.init(given)
    losses = []
    for step in range(steps):
        whole = samples(step, range(world))
        loss, gradients = jax.value_and_grad(loss_of)(given, whole)
        gradients = jax.grad(loss_of)(perturbed(given, gradients), whole)
        updates, state = tx.update(gradients, state, given)
        given = optax.apply_updates(given, updates)
        losses.append(float(loss))
    return losses, leaves({**given, "order": order})
