"""A small function with state, auxiliary output, numbers and replicated entries, trained in calls of one and of several
steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyaccel
import polyaccel.jax

WIDTH, SAMPLES = 5, 2
OPTAX = {
    "muon": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.contrib.muon(0.05)),
    "schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 9)),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "adam": {},
    "warm-up": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 6}}},
    "cycle": {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}}},
    "clipped": {"gradient_clipping": 0.5},
    "bf16": {"bf16": {"enabled": True}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.05}}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 2}},
    "aux": {"jax": {"execution": "native", "aux": "mean"}},
    "views": {"jax": {"execution": "views"}},
}


def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w"] * batch["scale"] + params["b"])
    noise = 0.01 * jax.random.normal(rng, hidden.shape)
    errors = (hidden + noise).sum(-1) - batch["weights"][batch["kind"]]
    mean = 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(hidden.mean(0))
    state = {"mean": mean, "count": state["count"] + 1}
    return jnp.square(errors).mean(), (state, {"hidden": hidden})


def engine_of(name: str, stage: int, accumulation: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        "verify": "off",
        "jax": {"execution": "native"},
        **CONFIGS.get(name, {}),
    }
    if name in OPTAX:
        del config["optimizer"]
    polyaccel.jax.init_distributed(config=config)
    return polyaccel.initialize(
        model=loss_fn,
        params={"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)},
        state={"mean": jnp.zeros(WIDTH), "count": 0},
        optimizer=OPTAX[name]() if name in OPTAX else None,
        config=config,
    )


def batches_of(rank: int, devices: int, accumulation: int, sizes: Sequence[int]) -> list[Any]:
    """A batch for each step, with `sizes` times the samples of a micro-batch."""
    found = []
    for step, times in enumerate(sizes):
        random = np.random.default_rng([step, rank])
        samples = SAMPLES * devices * accumulation * times
        found.append(
            {
                "x": random.standard_normal((samples, WIDTH), dtype=np.float32),
                "kind": random.integers(0, 3, samples),
                "weights": polyaccel.jax.replicated(random.standard_normal(3, dtype=np.float32)),
                "scale": 1.0 + step,
            }
        )
    return found


def compare(ranks: Any, name: str, stage: int, accumulation: int, devices: int, sizes: Sequence[int]) -> list[float]:
    """Train by `train_steps` and by `train_batch`; return the losses, once all that both have is equal bit for bit."""
    batches = batches_of(ranks.rank, devices, accumulation, sizes)
    one, many = engine_of(name, stage, accumulation), engine_of(name, stage, accumulation)
    alone = [float(one.train_batch(batch)) for batch in batches]
    together = many.train_steps(batches[:-1])
    together = [*map(float, together), float(many.train_batch(batches[-1]))]
    assert together == alone
    wanted, found = one.state_dict(), many.state_dict()
    assert jax.tree.structure(wanted) == jax.tree.structure(found)
    for path, value in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        other = found
        for key in path:
            other = other[key.key]
        np.testing.assert_array_equal(value, other, err_msg=jax.tree_util.keystr(path))
    assert (one.global_steps, one.get_lr()) == (many.global_steps, many.get_lr())
    assert (one.counters.skipped_steps > 0) == (name == "fp16")
    assert jax.tree.all(jax.tree.map(np.array_equal, one.aux, many.aux))
    assert many.get_global_grad_norm() == one.get_global_grad_norm()
    return together
