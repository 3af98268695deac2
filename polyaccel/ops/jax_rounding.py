"""Weights on arrays of JAX in their own type, rounded stochastically; see [Note: Stochastic rounding] in `ops.base`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.ops.numpy_rounding import bfloat16_bits, float16_bits
from polyaccel.ops.random_bits import scramble


def narrowed(values: Any, dtype: Any, low: Any, high: Any, indices: Any) -> Any:
    """`values` in `dtype`, of 16 bits. To be traced by JAX.

    `low` and `high` are the halves of the key, `indices` those of the elements in their parameter; all are uint32, one
    number or one an element.
    """
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    random = scramble(indices, low, high)
    halves = bfloat16_bits if dtype == jnp.bfloat16 else float16_bits
    return jax.lax.bitcast_convert_type(halves(bits, random, jnp.where).astype(jnp.uint16), dtype)
