"""Ten kinds of public training scripts of JAX, small, each of which trains on an engine and in plain jit and optax.

A script trains with a trainer that it gets: `Plain`, or `OnEngine`. The rest is the script's: averaged weights,
rollouts, a second network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import polyaccel
from polyaccel.jax import replicated, scan_units

ROWS, STEPS = 4, 3
OfRank = Callable[[int], Any]
"""The batch of a rank, by its number."""


class Plain:
    """A training in plain jit and optax over the batches of `world` ranks."""

    def __init__(
        self, world: int, fn: Any, params: Any, tx: Any, state: Any = None, stacked: Sequence[str] = ()
    ) -> None:
        self._fn, self._tx, self._world = fn, tx, world
        self.params, self.state = jax.tree.map(jnp.asarray, params), state
        self._slots, self._at = tx.init(self.params), 0
        self._of_rank = jax.jit(jax.value_and_grad(self._loss, has_aux=True))

    def _loss(self, params: Any, state: Any, batch: Any, key: Any) -> Any:
        batch = jax.tree.map(lambda one: one.value if _is_marked(one) else one, batch, is_leaf=_is_marked)
        if self.state is None:
            found = self._fn(params, batch, key)
            return (found[0] if isinstance(found, tuple) else found), None
        loss, found = self._fn(params, state, batch, key)
        return loss, found

    def train(self, of_rank: OfRank) -> float:
        found = []
        for rank in range(self._world):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), rank), self._at)
            found.append(self._of_rank(self.params, self.state, of_rank(rank), key))
        gradients = jax.tree.map(lambda *parts: sum(parts) / self._world, *(one for _, one in found))
        updates, self._slots = self._tx.update(gradients, self._slots, self.params)
        self.params = optax.apply_updates(self.params, updates)
        if self.state is not None:
            self.state = jax.tree.map(lambda *parts: sum(parts) / self._world, *(state for (_, state), _ in found))
        self._at += 1
        return float(np.mean([float(loss) for (loss, _), _ in found]))


class OnEngine:
    """A training on an engine at a stage, whose process has `devices` ranks."""

    def __init__(self, communicator: Any, section: dict[str, Any], devices: int = 1) -> None:
        self._communicator, self._section, self._devices = communicator, section, devices
        self._engines: list[Any] = []

    def __call__(self, fn: Any, params: Any, tx: Any, state: Any = None, stacked: Sequence[str] = ()) -> OnEngine:
        config = {"train_micro_batch_size_per_gpu": ROWS, **self._section}
        made = OnEngine(self._communicator, self._section, self._devices)
        is_cut = self._section["zero_optimization"]["stage"] == 3
        arguments = {"params": params, "state": state, "stacked": stacked if is_cut else ()}
        made._engine = polyaccel.initialize(model=fn, optimizer=tx, config=config, **arguments)
        self._engines.append(made._engine)
        return made

    @property
    def params(self) -> Any:
        return self._engine.params

    @property
    def state(self) -> Any:
        return self._engine.state

    def train(self, of_rank: OfRank) -> float:
        first = self._communicator.rank * self._devices
        own = [of_rank(rank) for rank in range(first, first + self._devices)]
        batch = jax.tree.map(
            lambda *parts: parts[0] if _is_marked(parts[0]) else np.concatenate([np.asarray(p) for p in parts]),
            *own,
            is_leaf=_is_marked,
        )
        loss = float(self._engine.train_batch(batch))
        losses = self._communicator.all_gather_object(loss)
        return float(np.mean(losses))

    def destroy(self) -> None:
        for engine in self._engines:
            engine.destroy()


def _is_marked(value: Any) -> bool:
    """Whether an entry of a batch is declared whole."""
    return isinstance(value, type(replicated(1)))


def _normal(seed: Sequence[int], *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _labels(seed: Sequence[int], count: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, count, shape or (ROWS,)).astype(np.int32)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


Found = tuple[list[float], Any]
"""Losses of steps, and a tree of arrays at the end."""


# flax's MNIST.


class Cnn(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.avg_pool(linen.relu(linen.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        return linen.Dense(5)(linen.relu(linen.Dense(8)(x.reshape(x.shape[0], -1))))


def mnist(trainer: Any) -> Found:
    model = Cnn()
    variables = model.init(jax.random.key(0), jnp.ones((1, 6, 6, 1)))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1, momentum=0.9))

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        logits = state.apply_fn({"params": params}, batch["image"])
        return _cross_entropy(logits, batch["label"]), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}

    made = trainer(loss_fn, state.params, state.tx)
    losses = [
        made.train(lambda rank, at=at: {"image": _normal([at, rank], ROWS, 6, 6, 1), "label": _labels([at, rank], 5)})
        for at in range(STEPS)
    ]
    return losses, made.params


# flax's ImageNet: batch statistics.


class BlockWithStatistics(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Conv(4, (3, 3), use_bias=False)(x))
        return linen.Dense(3)(linen.relu(x).mean(axis=(1, 2)))


def imagenet(trainer: Any) -> Found:
    model = BlockWithStatistics()
    variables = model.init(jax.random.key(0), jnp.ones((1, 5, 5, 2)), train=True)

    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        variables = {"params": params, "batch_stats": state}
        logits, after = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
        return _cross_entropy(logits, batch["label"]), after["batch_stats"]

    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    made = trainer(
        loss_fn, variables["params"], optax.sgd(schedule, momentum=0.9, nesterov=True), variables["batch_stats"]
    )
    losses = [
        made.train(lambda rank, at=at: {"image": _normal([at, rank], ROWS, 5, 5, 2), "label": _labels([at, rank], 3)})
        for at in range(STEPS)
    ]
    return losses, {"params": made.params, "state": made.state}


# A decoder of MaxText's kind: scanned layers, tied embedding, warmup, clipping.


def decoder(trainer: Any) -> Found:
    width, heads, words, length = 8, 2, 11, 6
    params = {
        "embedding": 0.1 * _normal([0], words, width),
        "layers": {
            "qkv": 0.2 * _normal([1], 2, width, 3 * width),
            "out": 0.2 * _normal([2], 2, width, width),
            "up": 0.2 * _normal([3], 2, width, 2 * width),
            "down": 0.2 * _normal([4], 2, 2 * width, width),
            "scale": np.ones((2, width), np.float32),
        },
        "scale": np.ones(width, np.float32),
    }

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

    def layer(p: Any, x: Any) -> Any:
        q, k, v = jnp.split(norm(x, p["scale"]) @ p["qkv"], 3, axis=-1)
        q, k, v = (one.reshape(*one.shape[:2], heads, -1) for one in (q, k, v))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        return x + jax.nn.silu(x @ p["up"]) @ p["down"]

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x = params["embedding"][batch[:, :-1]]
        x = scan_units(layer, x, params["layers"])
        return _cross_entropy(norm(x, params["scale"]) @ params["embedding"].T, batch[:, 1:])

    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), weight_decay=0.1),
    )
    made = trainer(loss_fn, params, tx, stacked=["layers"])
    losses = [made.train(lambda rank, at=at: _labels([at, rank], words, ROWS, length)) for at in range(STEPS)]
    return losses, made.params


# equinox's CNN.


class EqxCnn(eqx.Module):
    layers: list[Any]

    def __init__(self, key: Any) -> None:
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Conv2d(1, 2, 3, key=first), jax.nn.relu, jnp.ravel, eqx.nn.Linear(32, 4, key=second)]

    def __call__(self, x: Any) -> Any:
        for one in self.layers:
            x = one(x)
        return jax.nn.log_softmax(x)


def equinox_cnn(trainer: Any) -> Found:
    params, static = eqx.partition(EqxCnn(jax.random.key(0)), eqx.is_inexact_array)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x, y = batch
        scores = jax.vmap(eqx.combine(params, static))(x)
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

    made = trainer(loss_fn, params, optax.adamw(1e-2))
    losses = [
        made.train(lambda rank, at=at: (_normal([at, rank], ROWS, 1, 6, 6), _labels([at, rank], 4)))
        for at in range(STEPS)
    ]
    return losses, made.params


# equinox's BERT: attention with a padding mask, dropout by the key.


class Encoder(eqx.Module):
    embedding: Any
    attention: Any
    norm: Any
    out: Any
    dropout: Any

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(9, 8, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.norm = eqx.nn.LayerNorm(8)
        self.out = eqx.nn.Linear(8, 2, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, tokens: Any, key: Any) -> Any:
        mask = jnp.broadcast_to(tokens[None, :] > 0, (tokens.shape[0],) * 2)
        x = jax.vmap(self.embedding)(tokens)
        x = jax.vmap(self.norm)(x + self.attention(x, x, x, mask=mask))
        return self.out(self.dropout(x, key=key)[0])


def bert(trainer: Any) -> Found:
    params, static = eqx.partition(Encoder(jax.random.key(1)), eqx.is_inexact_array)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        keys = jax.random.split(rng, batch["tokens"].shape[0])
        return _cross_entropy(jax.vmap(eqx.combine(params, static))(batch["tokens"], keys), batch["label"])

    made = trainer(loss_fn, params, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))

    def batch(at: int, rank: int) -> Any:
        tokens = _labels([at, rank], 9, ROWS, 5)
        tokens[:, 0] = 1
        return {"tokens": tokens, "label": _labels([at, rank, 1], 2)}

    losses = [made.train(lambda rank, at=at: batch(at, rank)) for at in range(STEPS)]
    return losses, made.params


# A diffusion model, with an average of its weights.


def diffusion(trainer: Any) -> Found:
    class Score(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.enter, self.out = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x: Any, time: Any) -> Any:
            return self.out(jax.nn.silu(self.enter(jnp.concatenate([x, time[:, None]], axis=1))))

    graph, params = nnx.split(Score(nnx.Rngs(0)))

    def loss_fn(params: Any, x: Any, rng: Any) -> Any:
        of_time, of_noise = jax.random.split(rng)
        time = jax.random.uniform(of_time, x.shape[:1])
        noise = jax.random.normal(of_noise, x.shape)
        noisy = jnp.sqrt(1 - time)[:, None] * x + jnp.sqrt(time)[:, None] * noise
        return jnp.square(nnx.merge(graph, params)(noisy, time) - noise).mean()

    made = trainer(loss_fn, params, optax.adam(1e-2))
    average = jax.tree.map(jnp.asarray, made.params)
    losses = []
    for at in range(STEPS):
        losses.append(made.train(lambda rank, at=at: _normal([at, rank], ROWS, 3)))
        average = jax.tree.map(lambda kept, now: 0.9 * kept + 0.1 * now, average, made.params)
    return losses, average


# PPO: rollouts by the present policy, several epochs over them.


def ppo(trainer: Any) -> Found:
    params = {
        "body": {"w": 0.5 * _normal([0], 3, 8), "b": np.zeros(8, np.float32)},
        "policy": 0.5 * _normal([1], 8, 2),
        "value": 0.5 * _normal([2], 8, 1),
    }

    @jax.jit
    def apply(params: Any, seen: Any) -> Any:
        hidden = jnp.tanh(seen @ params["body"]["w"] + params["body"]["b"])
        return jax.nn.log_softmax(hidden @ params["policy"]), (hidden @ params["value"])[:, 0]

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        scores, values = apply(params, batch["seen"])
        chosen = jnp.take_along_axis(scores, batch["actions"][:, None], axis=1)[:, 0]
        ratio = jnp.exp(chosen - batch["scores"])
        gain = jnp.minimum(ratio * batch["gain"], jnp.clip(ratio, 0.8, 1.2) * batch["gain"])
        entropy = -(jnp.exp(scores) * scores).sum(axis=1)
        return (-gain + 0.5 * jnp.square(values - batch["returns"]) - 0.01 * entropy).mean()

    made = trainer(loss_fn, params, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5)))

    def rollout(at: int, rank: int, params: Any) -> Any:
        seen, actions = _normal([at, rank], ROWS, 3), _labels([at, rank], 2)
        scores, values = jax.tree.map(np.asarray, apply(params, seen))
        rewards = np.where(actions == (seen[:, 0] > 0), 1.0, -1.0).astype(np.float32)
        kept = scores[np.arange(ROWS), actions]
        return {"seen": seen, "actions": actions, "scores": kept, "gain": rewards - values, "returns": rewards}

    losses = []
    for at in range(STEPS - 1):
        policy = made.params  # the one that the rollouts are of, over all epochs
        losses += [made.train(lambda rank, at=at, policy=policy: rollout(at, rank, policy)) for _ in range(2)]
    return losses, made.params


# A VAE.


class Vae(linen.Module):
    @linen.compact
    def __call__(self, x: Any, key: Any) -> Any:
        hidden = linen.relu(linen.Dense(8, name="enter")(x))
        mean, spread = linen.Dense(2, name="mean")(hidden), linen.Dense(2, name="spread")(hidden)
        drawn = mean + jnp.exp(0.5 * spread) * jax.random.normal(key, mean.shape)
        return linen.Dense(6, name="out")(linen.relu(linen.Dense(8, name="back")(drawn))), mean, spread


def vae(trainer: Any) -> Found:
    model = Vae()
    params = model.init(jax.random.key(0), jnp.ones((1, 6)), jax.random.key(1))["params"]

    def loss_fn(params: Any, x: Any, rng: Any) -> Any:
        scores, mean, spread = model.apply({"params": params}, x, rng)
        likelihood = optax.sigmoid_binary_cross_entropy(scores, x).sum(axis=-1)
        divergence = -0.5 * jnp.sum(1 + spread - jnp.square(mean) - jnp.exp(spread), axis=-1)
        return (likelihood + divergence).mean()

    made = trainer(loss_fn, params, optax.adam(1e-2))
    losses = [
        made.train(lambda rank, at=at: (_normal([at, rank], ROWS, 6) > 0).astype(np.float32)) for at in range(STEPS)
    ]
    return losses, made.params


# A GAN: two engines, each of which gets the other's parameters as data.


def gan(trainer: Any) -> Found:
    def network(seed: int, *sizes: int) -> Any:
        return [
            {"w": 0.4 * _normal([seed, at], *pair), "b": np.zeros(pair[1], np.float32)}
            for at, pair in enumerate(pairwise(sizes))
        ]

    def apply(params: Any, x: Any) -> Any:
        for one in params[:-1]:
            x = jax.nn.leaky_relu(x @ one["w"] + one["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    def loss_of_judge(params: Any, batch: Any, rng: Any) -> Any:
        made_up = apply(batch["maker"], batch["noise"])
        return (jax.nn.softplus(-apply(params, batch["real"])) + jax.nn.softplus(apply(params, made_up))).mean()

    def loss_of_maker(params: Any, batch: Any, rng: Any) -> Any:
        return jax.nn.softplus(-apply(batch["judge"], apply(params, batch["noise"]))).mean()

    judge = trainer(loss_of_judge, network(0, 4, 8, 1), optax.adam(1e-2, b1=0.5))
    maker = trainer(loss_of_maker, network(1, 2, 8, 4), optax.adam(1e-2, b1=0.5))
    losses = []
    for at in range(STEPS):
        of_maker = jax.tree.map(replicated, maker.params)
        losses.append(
            judge.train(
                lambda rank, at=at, of_maker=of_maker: {
                    "real": _normal([at, rank, 0], ROWS, 4) + 1,
                    "noise": _normal([at, rank, 1], ROWS, 2),
                    "maker": of_maker,
                }
            )
        )
        of_judge = jax.tree.map(replicated, judge.params)
        losses.append(
            maker.train(
                lambda rank, at=at, of_judge=of_judge: {"noise": _normal([at, rank, 2], ROWS, 2), "judge": of_judge}
            )
        )
    return losses, {"judge": judge.params, "maker": maker.params}


# LoRA: frozen weights, and low ranks that are trained.


def lora(trainer: Any) -> Found:
    params = {
        "base": {"in": 0.5 * _normal([0], 6, 8), "out": 0.5 * _normal([1], 8, 3)},
        "lora": {
            name: {"a": 0.1 * _normal([2, at], shape[0], 2), "b": np.zeros((2, shape[1]), np.float32)}
            for at, (name, shape) in enumerate((("in", (6, 8)), ("out", (8, 3))))
        },
    }

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x = batch["x"]
        for name in ("in", "out"):
            low = params["lora"][name]
            x = x @ jax.lax.stop_gradient(params["base"][name]) + 2.0 * (x @ low["a"]) @ low["b"]
            x = jnp.tanh(x) if name == "in" else x
        return _cross_entropy(x, batch["y"])

    def label(params: Any) -> Any:
        return {name: jax.tree.map(lambda _, name=name: name, params[name]) for name in params}

    tx = optax.partition({"lora": optax.adamw(1e-2), "base": optax.set_to_zero()}, label)
    made = trainer(loss_fn, params, tx)
    losses = [
        made.train(lambda rank, at=at: {"x": _normal([at, rank], ROWS, 6), "y": _labels([at, rank], 3)})
        for at in range(STEPS)
    ]
    return losses, made.params


SCRIPTS: dict[str, Callable[[Any], Found]] = {
    one.__name__: one for one in (mnist, imagenet, decoder, equinox_cnn, bert, diffusion, ppo, vae, gan, lora)
}


def plainly(name: str, world: int) -> tuple[list[float], list[Any]]:
    """(losses, leaves at the end) in plain jit and optax on the samples of `world` ranks."""
    losses, tree = SCRIPTS[name](lambda *given, **named: Plain(world, *given, **named))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def on_engine(communicator: Any, name: str, section: dict[str, Any], devices: int = 1) -> tuple[list[float], list[Any]]:
    """(losses, leaves at the end) on an engine. Collective."""
    if "jax" in section:  # processes of native mode connect before the first array
        polyaccel.jax.init_distributed(config=section)
    trainer = OnEngine(communicator, section, devices)
    losses, tree = SCRIPTS[name](trainer)
    found = losses, [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    trainer.destroy()
    return found
