"""Models with running statistics, in linen, nnx, equinox and as a function, next to plain loops of jit and optax."""

from __future__ import annotations

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax_models import leaves

import polyaccel
import polyaccel.jax

WIDTH, SAMPLES, STEPS = 4, 4, 2
KINDS = ("linen", "nnx", "equinox", "function")


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += train
        x = linen.Dense(WIDTH, use_bias=False)(x)  # whose gradient would be rounding alone
        return jnp.tanh(linen.BatchNorm(use_running_average=not train, momentum=0.8)(x))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any, y: Any, train: bool) -> Any:
        for at in range(2):
            x = LinenBlock(name=f"blocks_{at}")(x, train)
        return jnp.square(linen.BatchNorm(use_running_average=not train)(x).sum(-1) - y).mean()


class Calls(nnx.Variable[Any]):
    """How often a block was called in training."""


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.calls = Calls(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return jnp.tanh(self.norm(self.linear(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Any, y: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return jnp.square(self.norm(x).sum(-1) - y).mean()


class EquinoxBlock(equinox.Module):
    linear: equinox.nn.Linear
    norm: equinox.nn.BatchNorm

    def __init__(self, key: Any) -> None:
        self.linear = equinox.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key)
        self.norm = equinox.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch", momentum=0.8)

    def __call__(self, x: Any, state: Any) -> Any:
        def one(x: Any, state: Any) -> Any:
            return self.norm(self.linear(x), state)

        x, state = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.tanh(x), state


class Equinox(equinox.Module):
    blocks: list[EquinoxBlock]

    def __init__(self, key: Any) -> None:
        self.blocks = [EquinoxBlock(one) for one in jax.random.split(key)]

    def __call__(self, x: Any, state: Any, y: Any) -> Any:
        for block in self.blocks:
            x, state = block(x, state)
        return jnp.square(x.sum(-1) - y).mean(), state


def function(params: Any, state: Any, batch: Any, rng: Any) -> Any:
    """Running mean, a counter and a random key; the auxiliary output is the mean of the batch."""
    key, own = jax.random.split(state["key"])
    hidden = batch["x"] @ params["w"]
    mean = state["mean"] if rng is None else hidden.mean(0)
    noise = 0.0 if rng is None else 0.1 * jax.random.normal(own, hidden.shape)
    loss = jnp.square(jnp.tanh(hidden - mean + noise).sum(-1) - batch["y"]).mean()
    mean = 0.8 * state["mean"] + 0.2 * jax.lax.stop_gradient(hidden.mean(0))
    return loss, ({"mean": mean, "calls": state["calls"] + 1, "key": key}, {"mean": hidden.mean(0)})


def data(step: int, rank: int = 0, samples: int = SAMPLES) -> dict[str, Any]:
    random = np.random.default_rng([step, rank])
    x = 1.0 + random.standard_normal((samples, WIDTH), dtype=np.float32)
    return {"x": x, "y": random.standard_normal(samples, dtype=np.float32)}


def build(kind: str) -> tuple[dict[str, Any], Any, Any, Any]:
    """(arguments of initialize, plain `loss(params, state, batch, trains)` -> (loss, state), parameters, state)."""
    if kind == "linen":
        model = Linen()
        variables = jax.jit(lambda key: model.init(key, **data(0), train=False))(jax.random.key(0))
        rest = {name: value for name, value in variables.items() if name != "params"}

        def of_linen(params: Any, state: Any, batch: Any, trains: bool) -> Any:
            return model.apply({"params": params, **state}, **batch, train=trains, mutable=list(state))

        return {"model": model, "params": variables}, of_linen, variables["params"], rest
    if kind == "nnx":
        module = Nnx(nnx.Rngs(0))
        graph, params, rest = nnx.split(module, nnx.Param, ...)

        def of_nnx(params: Any, state: Any, batch: Any, trains: bool) -> Any:
            whole = nnx.merge(graph, params, state, copy=True)
            whole.train() if trains else whole.eval()
            return whole(**batch), nnx.state(whole, nnx.Not(nnx.Param))

        return {"model": module}, of_nnx, params, rest
    if kind == "equinox":
        net, first = equinox.nn.make_with_state(Equinox)(jax.random.key(0))
        params, static = equinox.partition(net, equinox.is_inexact_array)

        def of_equinox(params: Any, state: Any, batch: Any, trains: bool) -> Any:
            whole = equinox.combine(params, static)
            return (whole if trains else equinox.nn.inference_mode(whole))(batch["x"], state, batch["y"])

        return {"model": net, "state": first}, of_equinox, params, first
    weights = {"w": jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) * 0.3}
    begin = {"mean": jnp.zeros(WIDTH), "calls": 0, "key": jax.random.key(7)}

    def of_function(params: Any, state: Any, batch: Any, trains: bool) -> Any:
        loss, (state, _) = function(params, state, batch, jax.random.key(0) if trains else None)
        return loss, state

    return {"model": function, "params": weights, "state": begin}, of_function, weights, begin


def plain(kind: str, world: int = 1, accumulation: int = 1, reduction: str = "mean") -> Any:
    """(losses of rank 0, loss of an evaluation, parameters, state of rank 0) of a loop of plain jit and optax."""
    _, loss, params, state = build(kind)
    transformation = optax.adamw(0.05)
    gradients = jax.jit(jax.value_and_grad(lambda p, s, b: loss(p, s, b, True), has_aux=True))
    evaluate = jax.jit(lambda p, s, b: loss(p, s, b, False)[0])
    moments, states, losses = transformation.init(params), [state] * world, []
    for step in range(STEPS):
        total, own = None, []
        for rank in range(world):
            whole = data(step, rank, SAMPLES * accumulation)
            for at in range(accumulation):
                batch = {name: value[at * SAMPLES : (at + 1) * SAMPLES] for name, value in whole.items()}
                (found, states[rank]), gradient = gradients(params, states[rank], batch)
                total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
                own += [float(found)] if rank == 0 else []
        losses.append(sum(own) / accumulation)
        mean = jax.tree.map(lambda leaf: leaf / (world * accumulation), total)
        updates, moments = transformation.update(mean, moments, params)
        params = optax.apply_updates(params, updates)
        if reduction == "mean" and world > 1:
            states = [jax.tree.map(_mean, *states)] * world
    return losses, float(evaluate(params, states[0], data(9))), leaves(params), flat(states[0])


def _mean(*values: Any) -> Any:
    is_floating = jnp.issubdtype(values[0].dtype, jnp.floating)
    return jnp.mean(jnp.stack(values), 0) if is_floating else values[0]


def flat(state: Any) -> list[Any]:
    """The arrays of a state, random keys as their data."""
    is_key = jax.dtypes.prng_key
    found = [
        jax.random.key_data(one) if jax.dtypes.issubdtype(one.dtype, is_key) else one
        for one in map(jnp.asarray, jax.tree.leaves(state))
    ]
    return [np.asarray(one) for one in found]


def engine_of(kind: str, stage: int, accumulation: int, *, reduction: Any = None, **changes: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "verify": "off",
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64},
        **changes,
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if "jax" in changes:  # native mode, whose processes connect before the first array
        polyaccel.jax.init_distributed(config=config)
    arguments = build(kind)[0]
    return polyaccel.initialize(**arguments, optimizer=optax.adamw(0.05), config=config, state_reduction=reduction)


def train(ranks: Any, kind: str, stage: int, accumulation: int = 1, devices: int = 1, **named: Any) -> Any:
    """As `plain`, of an engine."""
    engine = engine_of(kind, stage, accumulation, **named)
    losses = [float(engine.train_batch(batch_of(step, ranks.rank, accumulation, devices))) for step in range(STEPS)]
    evaluated = float(engine.eval_batch(joined([data(9)] * devices)))
    found = losses, evaluated, leaves(engine.params), flat(engine.state)
    engine.destroy()
    return found


def batch_of(step: int, rank: int, accumulation: int, devices: int) -> dict[str, Any]:
    """A process's batch: micro-batch by micro-batch the samples of its devices."""
    wholes = [data(step, rank * devices + at, SAMPLES * accumulation) for at in range(devices)]
    parts = [
        {name: value[micro * SAMPLES : (micro + 1) * SAMPLES] for name, value in whole.items()}
        for micro in range(accumulation)
        for whole in wholes
    ]
    return joined(parts)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_same(found: Any, wanted: Any, rtol: float = 1e-5, *, has_losses: bool = True) -> None:
    if has_losses:
        np.testing.assert_allclose(found[0], wanted[0], rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], rtol=rtol, atol=1e-6)
    assert [*found[2].values()]
    for one, other in zip(found[2].values(), wanted[2].values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)
    for one, other in zip(found[3], wanted[3], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)
