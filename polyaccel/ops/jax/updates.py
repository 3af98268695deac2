"""An optimizer's update, and the rounding of weights, as pure functions on flat arrays of JAX.

A step that is compiled as a whole traces them; the kernels of `polyaccel.ops.jax.kernels` run them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.ops.base import Formula
from polyaccel.ops.rounding import bfloat16_bits, float16_bits, scramble

_ROW_NUMEL = 32


class JaxMath:
    """`ArrayMath` on arrays of JAX, traced or not: everything is a new array."""

    def mul(self, a: Any, b: Any, slot: int = 0) -> Any:
        return a * b

    def sqrt(self, a: Any, slot: int = 0) -> Any:
        return jnp.sqrt(a)

    def abs(self, a: Any, slot: int = 0) -> Any:
        return jnp.abs(a)

    def maximum(self, a: Any, b: Any) -> Any:
        return jnp.maximum(a, b)

    def sign(self, a: Any) -> Any:
        return jnp.sign(a)

    def plus_decay(self, a: Any, weights: Any, decay: Any) -> Any:
        return a + weights * decay

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        return jnp.where(jnp.asarray(condition) != 0, a, b)


def updated(
    formula: Formula, constants: Sequence[Any], master: Any, grad: Any, states: Sequence[Any], grad_scale: Any
) -> tuple[Any, ...]:
    """(new master, every new state) in their types, for the states that `formula` reads; a direction is in the type to
    compute in.

    `grad` is multiplied by `grad_scale`. The arithmetic is in float32, in float64 where the master weights are.
    `constants` are the formula's, made on the host (`1 - beta2**step` would lose half its digits in float32): each a
    number, or an array with a value an element where parameters differ.
    """
    wide = jnp.float64 if master.dtype == jnp.float64 else jnp.float32
    g = grad.astype(wide) * jnp.asarray(grad_scale, wide)
    found = formula.arrays(JaxMath(), constants, master.astype(wide), g, *(state.astype(wide) for state in states))
    narrow = [array.astype(before.dtype) for array, before in zip(found, (master, *states), strict=False)]
    return (*narrow, *found[len(narrow) :])


def narrowed(values: Any, dtype: Any, low: Any, high: Any, indices: Any) -> Any:
    """`values` in `dtype`, of 16 bits. To be traced by JAX.

    `low` and `high` are the halves of the key, `indices` those of the elements in their parameter; all are uint32, one
    number or one an element.
    """
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    random = scramble(indices, low, high)
    halves = bfloat16_bits if dtype == jnp.bfloat16 else float16_bits
    return jax.lax.bitcast_convert_type(halves(bits, random, jnp.where).astype(jnp.uint16), dtype)


def precise_sum(values: Any) -> Any:
    """The sum by rows of rows: its error grows with the logarithm of the length, where XLA may add one after another.
    The barrier keeps XLA from making one sum of all."""
    while values.size > _ROW_NUMEL:
        padded = jnp.pad(values, (0, -values.size % _ROW_NUMEL))
        values = jax.lax.optimization_barrier(jnp.sum(padded.reshape(-1, _ROW_NUMEL), axis=1))
    return jnp.sum(values)
