"""The byte-level GPT of examples/gpt as a JAX function: the same parameters under the same names, in torch's layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.jax import unit

VOCABULARY = 256
Params = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. `context` is the longest sequence, in bytes."""

    layers: int
    width: int
    heads: int
    context: int


SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=2, context=64),  # 0.1 M parameters, for tests
    "small": Shape(layers=6, width=384, heads=6, context=256),  # 10.8 M
    "medium": Shape(layers=9, width=512, heads=8, context=256),  # 28.6 M
    "large": Shape(layers=16, width=800, heads=10, context=256),  # 123.4 M
}
"""What `--size` can name."""


def initial_params(shape: Shape, seed: int) -> Params:
    """Parameters as a pytree of numpy arrays whose paths are the names of the torch model."""
    random = np.random.default_rng(seed)
    width = shape.width

    def normal(*sizes: int, std: float = 0.02) -> Any:
        return std * random.standard_normal(sizes, dtype=np.float32)

    def linear(inputs: int, outputs: int, std: float = 0.02) -> Params:
        return {"weight": normal(outputs, inputs, std=std), "bias": np.zeros(outputs, np.float32)}

    def norm() -> Params:
        return {"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    # What adds to the residual stream starts smaller, so that its variance does not grow with depth.
    into_residual = 0.02 / (2 * shape.layers) ** 0.5
    return {
        "tokens": {"weight": normal(VOCABULARY, width)},
        "positions": {"weight": normal(shape.context, width)},
        "blocks": [
            {
                "attention_norm": norm(),
                "qkv": linear(width, 3 * width),
                "attention_out": linear(width, width, into_residual),
                "mlp_norm": norm(),
                "mlp_in": linear(width, 4 * width),
                "mlp_out": linear(4 * width, width, into_residual),
            }
            for _ in range(shape.layers)
        ],
        "norm": norm(),
    }


def _linear(params: Params, hidden: jax.Array) -> jax.Array:
    return hidden @ params["weight"].T + params["bias"]


def _norm(params: Params, hidden: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return scaled.astype(hidden.dtype) * params["weight"] + params["bias"]


def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention, softmax in fp32; all of (batch, heads, sequence, width of a head)."""
    # XLA on the CPU is faster with this than with jax.nn.dot_product_attention: heads come before the sequence, as its
    # products read them, and the softmax's sums divide what was mixed. That is narrower than the weights, and so is
    # then what the backward pass sums (FlashAttention, Dao et al. 2022, appendix B.2).
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(query.shape[2], dtype=bool), scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    return (mixed / weights.sum(-1, keepdims=True)).astype(value.dtype)


def _block(params: Params, hidden: jax.Array, *, batch: int, heads: int) -> jax.Array:
    """Attention and a feed-forward net, each behind a norm and around a residual (GPT-2, Radford et al. 2019)."""
    tokens, width = hidden.shape
    qkv = _linear(params["qkv"], _norm(params["attention_norm"], hidden))
    query, key, value = qkv.reshape(batch, tokens // batch, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
    mixed = _attention(query, key, value).transpose(0, 2, 1, 3).reshape(tokens, width)
    hidden = hidden + _linear(params["attention_out"], mixed)
    inner = jax.nn.gelu(_linear(params["mlp_in"], _norm(params["mlp_norm"], hidden)), approximate=True)
    return hidden + _linear(params["mlp_out"], inner)


def logits(params: Params, tokens: jax.Array, *, heads: int) -> jax.Array:
    """Logits (batch, sequence, 256) in fp32 for `tokens` (batch, sequence), integers."""
    batch, length = tokens.shape
    hidden = params["tokens"]["weight"][tokens] + params["positions"]["weight"][:length]
    # One row a token: of three dimensions, XLA on the CPU computes a block's gradient anew from those of all later
    # blocks wherever it is read, a fifth of the step of nine blocks.
    hidden = hidden.reshape(batch * length, -1)
    block = unit(partial(_block, batch=batch, heads=heads))  # at stage 3, gathered for its own computation only
    for layer in params["blocks"]:
        hidden = block(layer, hidden)
    found = _norm(params["norm"], hidden) @ params["tokens"]["weight"].T
    return found.astype(jnp.float32).reshape(batch, length, VOCABULARY)


def loss(params: Params, batch: Any, rng: Any, *, heads: int) -> jax.Array:
    """The mean loss in nats a byte of a batch (tokens, targets), each (batch, sequence)."""
    tokens, targets = batch
    found = logits(params, tokens, heads=heads)
    right = jnp.take_along_axis(found, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(found, axis=-1) - right).mean()


def generate(params: Params, shape: Shape, prompt: bytes, numel: int, *, seed: int) -> Iterator[int]:
    """`numel` bytes that follow `prompt`, drawn at temperature 0.7."""
    key = jax.random.key(seed)

    @partial(jax.jit, static_argnames="heads")
    def draw(params: Params, window: jax.Array, last: int, key: jax.Array, heads: int) -> jax.Array:
        return jax.random.categorical(key, logits(params, window[None], heads=heads)[0, last] / 0.7)

    text = list(prompt)
    for at in range(numel):
        recent = text[-shape.context :]
        window = np.zeros(shape.context, np.int32)  # of one length, for one program; attention is causal
        window[: len(recent)] = recent
        drawn = int(draw(params, window, len(recent) - 1, jax.random.fold_in(key, at), shape.heads))
        text.append(drawn)
        yield drawn
