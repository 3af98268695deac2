"""A training whose auxiliary output is averaged over micro-batches, devices and ranks, and the means by numpy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import polyaccel

ROWS, MICRO_BATCHES, STEPS = 2, 3, 2


def _batch(step: int, sources: range) -> Any:
    """The samples of a step, of some ranks or devices, micro-batch by micro-batch."""
    drawn = [np.random.default_rng([step, source]).standard_normal((MICRO_BATCHES, ROWS, 4)) for source in sources]
    return np.concatenate(drawn, axis=1).reshape(-1, 4).astype(np.float32)


def _loss(params: Any, batch: Any, rng: Any) -> Any:
    scores = batch @ params["w"]
    aux = {
        "mean": scores.mean().astype(jnp.bfloat16),
        "columns": batch.mean(axis=0),
        "positive": jnp.sum(batch[:, 0] > 0),
        "is_first": batch[0, 0] > 0,
    }
    return jnp.mean((scores - 1.0) ** 2), aux


def train(communicator: Any, jax_section: dict[str, Any], devices: int = 1) -> list[Any]:
    """The auxiliary outputs after each step, after `value_and_grad`, and of one evaluation."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "jax": {"aux": "mean", **jax_section},
    }
    if devices > 1:  # processes connect before the first array
        polyaccel.jax.init_distributed(config=config)
    engine = polyaccel.initialize(model=_loss, params={"w": np.ones((4, 1), np.float32)}, config=config)
    first, found = communicator.rank * devices, []
    own = range(first, first + devices)
    for step in range(STEPS):
        engine.train_batch(_batch(step, own))
        found.append(engine.aux)
    engine.value_and_grad(_batch(0, own))
    found.append(engine.aux)
    types = [{name: value.dtype.name for name, value in one.items()} for one in found]
    engine.destroy()
    return [{name: np.asarray(value, np.float32) for name, value in one.items()} for one in found] + types


def check(runs: list[list[Any]], sources: int) -> None:
    """Compare what each rank found with means over all samples."""
    for *found, first, second, third in runs:
        for at, one in enumerate(found):
            # Micro-batches of a step, and one of all its samples for `value_and_grad`.
            parts = MICRO_BATCHES if at < STEPS else 1
            rows = np.stack([_batch(at % STEPS, range(source, source + 1)) for source in range(sources)])
            of_parts = rows.reshape(sources * parts, -1, 4)
            np.testing.assert_allclose(one["columns"], rows.mean(axis=(0, 1)), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(one["positive"], (of_parts[..., 0] > 0).sum(axis=1).mean(), rtol=1e-6)
            if parts > 1:  # devices share the samples of `value_and_grad` in another order
                np.testing.assert_allclose(one["is_first"], (of_parts[:, 0, 0] > 0).mean(), rtol=1e-6)
        wanted = {"mean": "bfloat16", "columns": "float32", "positive": "float32", "is_first": "float32"}
        assert first == second == third == wanted
