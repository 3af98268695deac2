"""The public transformations of optax, found by walking its modules, and a small training with each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyaccel
from polyaccel.jax.pytree import path_name

STEPS, RANKS = 3, 2
NATIVE = "native"
Make = Callable[[], Any]


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


def _absolute(updates: Any) -> Any:
    return jax.tree.map(jnp.abs, updates)


def _labels(params: Any) -> Any:
    return {name: "frozen" if name == "scale" else "trained" for name in params}


def _every_other(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _partition() -> Any:
    return {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}


WITH_ARGUMENTS: dict[str, Make] = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.scale(-1e-2)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "chain": lambda: optax.chain(optax.clip(0.1), optax.adam(1e-2)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.sgd(1e-2, momentum=0.9), _every_other),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.sgd(1e-2, momentum=0.9), _every_other),
    "contrib.differentially_private_aggregate": lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, 0),
    "contrib.dpsgd": lambda: optax.contrib.dpsgd(1e-2, 1.0, 0.1, 0),
    "contrib.mechanize": lambda: optax.contrib.mechanize(optax.adam(1e-2)),
    "contrib.sam": lambda: optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2)),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(1e-2)),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(1e-2),
    "lookahead": lambda: optax.lookahead(optax.sgd(1e-2), 2, 0.5),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), _matrices), optax.sgd(1e-2)),
    "measure_with_ema": lambda: optax.chain(optax.measure_with_ema(_absolute, 0.9), optax.scale(-1e-2)),
    "multi_transform": lambda: optax.multi_transform(_partition(), _labels),
    "partition": lambda: optax.partition(_partition(), _labels),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: -1e-2 / (1 + count)),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(1e-2), freeze_mask={"kernel": False, "scale": True, "out": False}
    ),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), optax.scale(-1e-2)),
    "stateless": lambda: optax.stateless(lambda updates, _: jax.tree.map(lambda one: -1e-2 * one, updates)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda one, _: -1e-2 * one),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(1e-2)),
}
"""Public names that take more than a rate."""


def transformations() -> dict[str, Make]:
    """Return what optax's public functions make, given a rate, nothing, or `WITH_ARGUMENTS`."""
    found = dict(WITH_ARGUMENTS)
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name in sorted(vars(module)):
            make = getattr(module, name)
            if name.startswith("_") or isinstance(make, type) or not callable(make) or prefix + name in found:
                continue
            for arguments in ((1e-2,), ()):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        made = make(*arguments)
                except Exception:  # it needs others
                    continue
                if hasattr(made, "init") and hasattr(made, "update"):
                    # Updates without a rate grow without bound, and any rounding with them.
                    rate = optax.identity if arguments else lambda: optax.scale(-1e-2)
                    found[prefix + name] = lambda make=make, arguments=arguments, rate=rate: optax.chain(
                        make(*arguments), rate()
                    )
                    break
    return found


def start(name: str = "") -> Any:
    """The parameters with which the transformation `name` begins."""
    if name == "lookahead":
        return optax.LookaheadParams.init_synced(start())
    draw = np.random.default_rng(0)
    shapes = {"kernel": (3, 5), "scale": (5,), "out": (5, 2)}
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def loss(params: Any, batch: Any, rng: Any) -> Any:
    found = (jnp.tanh(batch["x"] @ params["kernel"]) * params["scale"]) @ params["out"]
    return jnp.square(found - batch["y"]).mean()


def data(at: int, rank: int) -> Any:
    draw = np.random.default_rng([at, rank])
    return {name: draw.standard_normal((4, size), dtype=np.float32) for name, size in (("x", 3), ("y", 2))}


def plainly(make: Make, units: int = 0, *, passes_loss: bool = False, name: str = "") -> Any:
    """The parameters after `STEPS` in plain optax, from weights that are moved by units in the last place."""
    towards = np.float32(units * np.inf) if units else None
    first = start(name) if towards is None else jax.tree.map(lambda one: np.nextafter(one, towards), start(name))
    transformation, params = make(), jax.tree.map(jnp.asarray, first)
    state = transformation.init(params)
    for at in range(STEPS):
        fast = params.fast if name == "lookahead" else params
        each = [jax.value_and_grad(loss)(fast, data(at, rank), None) for rank in range(RANKS)]
        gradients = jax.tree.map(lambda *of_ranks: sum(of_ranks) / RANKS, *(gradient for _, gradient in each))
        extra = {"value": sum(one for one, _ in each) / RANKS} if passes_loss else {}
        updates, state = transformation.update(gradients, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return _by_path(params)


def _by_path(params: Any) -> dict[str, Any]:
    return {path_name(path): np.asarray(one) for path, one in jax.tree_util.tree_leaves_with_path(params)}


def under_engine(communicator: Any, name: str, stage: int | str) -> Any:
    """The parameters after `STEPS` at a stage, or in native mode, where one process has the samples of all ranks."""
    is_native = stage == NATIVE
    count = communicator.world_size
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4 * RANKS // count,
        "zero_optimization": {"stage": 2 if is_native else stage, "reduce_bucket_size": 12},
        "jax": {"execution": "native" if is_native else "views"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = transformations()[name]()
        engine = polyaccel.initialize(model=loss, params=start(name), optimizer=made, config=config)
        try:
            for at in range(STEPS):
                own: Sequence[Any] = [data(at, rank) for rank in range(communicator.rank, RANKS, count)]
                engine.train_batch({name: np.concatenate([one[name] for one in own]) for name in own[0]})
            return _by_path(engine.params)
        finally:
            engine.destroy()
