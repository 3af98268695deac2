"""Modules of flax and equinox with blocks: in lists, where the engine finds them, and called as units by hand."""

from __future__ import annotations

from inspect import signature
from typing import Any

import equinox
import jax
import jax.numpy as jnp
from flax import linen, nnx

from polyaccel.jax import unit

WIDTH, DEPTH = 4, 3
DROPPED = 0.25


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, hidden: Any, scale: float = 1.0, *, is_shifted: bool = False) -> Any:
        new = linen.Dropout(DROPPED, deterministic=not self.has_rng("dropout"))(linen.Dense(WIDTH)(jnp.tanh(hidden)))
        return hidden + scale * new + 0.1 if is_shifted else hidden + scale * new


class Linen(linen.Module):
    """Its first block runs twice; `how` wraps the blocks."""

    how: Any = None

    @linen.compact
    def __call__(self, x: Any, y: Any) -> Any:
        kind = LinenBlock if self.how is None else self.how(LinenBlock)
        blocks = [kind(name=f"blocks_{at}") for at in range(DEPTH)]
        hidden = blocks[0](linen.Dense(WIDTH, name="enter")(x), 0.5)
        for block in blocks:  # a checkpoint of linen's makes every argument an array
            hidden = block(hidden, is_shifted=True) if self.how is None else block(hidden)
        return jnp.square(hidden.sum(axis=-1) - y).mean()


class LinenTied(linen.Module):
    """Its blocks compute with a layer that is not theirs."""

    @linen.compact
    def __call__(self, x: Any, y: Any) -> Any:
        tied = linen.Dense(3, name="tied")
        for at in range(DEPTH):
            x = LinenTiedBlock(tied, name=f"blocks_{at}")(x)
        return jnp.square(x.sum(axis=-1) - y).mean()


class LinenTiedBlock(linen.Module):
    tied: linen.Module

    @linen.compact
    def __call__(self, hidden: Any) -> Any:
        return hidden + linen.Dense(3)(jnp.tanh(self.tied(hidden)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(DROPPED, rngs=rngs)

    def __call__(self, hidden: Any, scale: float = 1.0, *, is_shifted: bool = False) -> Any:
        new = self.dropout(self.linear(jnp.tanh(hidden)))
        return hidden + scale * new + 0.1 if is_shifted else hidden + scale * new


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.enter = nnx.Linear(3, WIDTH, rngs=rngs)
        blocks = [NnxBlock(rngs) for _ in range(DEPTH)]
        self.blocks = nnx.List(blocks) if hasattr(nnx, "List") else blocks

    def __call__(self, x: Any, y: Any) -> Any:
        hidden = self.blocks[0](self.enter(x), 0.5)
        for block in self.blocks:
            assert isinstance(block, NnxBlock)
            hidden = block(hidden, is_shifted=True)
        return jnp.square(hidden.sum(axis=-1) - y).mean()


class EquinoxBlock(equinox.Module):
    linear: equinox.nn.Linear
    dropout: equinox.nn.Dropout

    def __init__(self, key: Any) -> None:
        self.linear = equinox.nn.Linear(WIDTH, WIDTH, key=key)
        self.dropout = equinox.nn.Dropout(DROPPED)

    def __call__(self, hidden: Any, scale: float = 1.0, *, is_shifted: bool = False, key: Any = None) -> Any:
        new = self.dropout(jax.vmap(self.linear)(jnp.tanh(hidden)), key=key, inference=key is None)
        return hidden + scale * new + 0.1 if is_shifted else hidden + scale * new


class Equinox(equinox.Module):
    enter: equinox.nn.Linear
    blocks: list[EquinoxBlock]

    def __init__(self, key: Any) -> None:
        first, *others = jax.random.split(key, DEPTH + 1)
        self.enter = equinox.nn.Linear(3, WIDTH, key=first)
        self.blocks = [EquinoxBlock(other) for other in others]

    def __call__(self, x: Any, y: Any, key: Any = None) -> Any:
        keys = [None] * (DEPTH + 1) if key is None else jax.random.split(key, DEPTH + 1)
        hidden = self.blocks[0](jax.vmap(self.enter)(x), 0.5, key=keys[-1])
        for block, one in zip(self.blocks, keys, strict=False):
            assert isinstance(block, EquinoxBlock)
            assert "key" in signature(type(block).__call__).parameters
            hidden = block(hidden, is_shifted=True, key=one)
        return jnp.square(hidden.sum(axis=-1) - y).mean()


class EquinoxInVmap(Equinox):
    """Written for one sample, as many are: its blocks are called inside vmap."""

    def __call__(self, x: Any, y: Any, key: Any = None) -> Any:
        def one(x: Any) -> Any:
            hidden = self.enter(x)
            for block in self.blocks:
                hidden = hidden + block.linear(jnp.tanh(hidden))
            return hidden.sum(axis=-1)

        return jnp.square(jax.vmap(one)(x) - y).mean()


# By hand: `first` and `second`, whose names are not those of repeated blocks.


def linen_by_hand() -> tuple[Any, Any]:
    block = LinenBlock()
    names = ("first", "second")
    keys = jax.random.split(jax.random.key(0), len(names))
    params = {name: block.init(key, jnp.ones((1, WIDTH)))["params"] for name, key in zip(names, keys, strict=True)}

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        hidden = jnp.pad(batch["x"], ((0, 0), (0, 1)))
        for name in names:
            hidden = unit(lambda params, x: block.apply({"params": params}, x))(params[name], hidden)
        return jnp.square(hidden.sum(axis=-1) - batch["y"]).mean()

    return loss, params


class NnxByHand(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = NnxBlock(rngs), NnxBlock(rngs)

    def __call__(self, x: Any, y: Any) -> Any:
        hidden = jnp.pad(x, ((0, 0), (0, 1)))
        for block in (self.first, self.second):
            hidden = unit(lambda block, x: block(x))(block, hidden)
        return jnp.square(hidden.sum(axis=-1) - y).mean()


class EquinoxByHand(equinox.Module):
    first: EquinoxBlock
    second: EquinoxBlock

    def __init__(self, key: Any) -> None:
        one, other = jax.random.split(key)
        self.first, self.second = EquinoxBlock(one), EquinoxBlock(other)

    def __call__(self, x: Any, y: Any, key: Any = None) -> Any:
        hidden = jnp.pad(x, ((0, 0), (0, 1)))
        for block in (self.first, self.second):
            hidden = unit(lambda block, x, key: block(x, key=key))(block, hidden, key)
        return jnp.square(hidden.sum(axis=-1) - y).mean()


def arguments(kind: str) -> dict[str, Any]:
    """What `initialize` gets of this model, the same weights every time."""
    key, rngs = jax.random.key(0), nnx.Rngs(0)
    example = {"x": jnp.ones((2, 3)), "y": jnp.ones(2)}
    if kind == "linen by hand":
        fn, params = linen_by_hand()
        return {"model": fn, "params": params}
    if kind.startswith("linen"):
        model = LinenTied() if kind == "linen, tied" else Linen(linen.remat if kind == "linen, remat" else None)
        return {"model": model, "params": model.init(key, **example)}
    others = {
        "nnx": lambda: Nnx(rngs),
        "nnx by hand": lambda: NnxByHand(rngs),
        "equinox": lambda: Equinox(key),
        "equinox by hand": lambda: EquinoxByHand(key),
        "equinox, vmap": lambda: EquinoxInVmap(key),
    }
    return {"model": others[kind]()}
