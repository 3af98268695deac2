"""The ops on arrays of JAX.

Updates and the rounding of weights are pure functions on flat arrays. A step that is compiled as a whole traces them;
the kernels run them one by one. Buffers are handles: each op computes new arrays, which the buffers then point to. The
ops on quantised blocks are missing. Replaced arrays are donated to the computation, so their memory is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.ops.base import Formula, KernelTable, Rule, StochasticRounding, by_op
from polyaccel.ops.rounding import bfloat16_bits, float16_bits, halves, scramble

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
    """Sum by rows of rows, with logarithmic error; the barrier keeps XLA from one long sum."""
    while values.size > _ROW_NUMEL:
        padded = jnp.pad(values, (0, -values.size % _ROW_NUMEL))
        values = jax.lax.optimization_barrier(jnp.sum(padded.reshape(-1, _ROW_NUMEL), axis=1))
    return jnp.sum(values)


def jax_kernels() -> KernelTable:
    """The table of these kernels."""
    return KernelTable("jax", by_op(combine, scale, cast, square_sums, update))


_COMBINE = {
    ReduceOp.SUM: jnp.add,
    ReduceOp.AVG: jnp.add,
    ReduceOp.MAX: jnp.maximum,
    ReduceOp.MIN: jnp.minimum,
    ReduceOp.PROD: jnp.multiply,
}
_jit = partial(jax.jit, donate_argnums=0)
_combine = {op: _jit(lambda mine, other, apply=apply: apply(mine, other)) for op, apply in _COMBINE.items()}
_scale = _jit(lambda mine, factor: (mine * jnp.asarray(factor, mine.dtype)).astype(mine.dtype))
_add_squares = _jit(lambda sums, piece, index: sums.at[index].add(precise_sum(jnp.square(piece.astype(sums.dtype)))))
_update = jax.jit(updated, static_argnums=0, donate_argnums=(2, 4))
_update_states = jax.jit(lambda *arguments: updated(*arguments)[1:], static_argnums=0, donate_argnums=4)


@partial(jax.jit, static_argnums=1)
def _narrowed(values: Any, dtype: Any, low: Any, high: Any, start: Any) -> Any:
    return narrowed(values, dtype, low, high, jax.lax.iota(jnp.uint32, values.size) + start)


def combine(target: Buffer, source: Buffer, op: ReduceOp) -> None:
    """See `ReduceFn`. `source` is converted to `target`'s type first."""
    other = source.raw.astype(target.raw.dtype)
    _replace(target, _combine[op](target.raw, jnp.array(other) if other is target.raw else other))


def scale(target: Buffer, factor: float) -> None:
    """See `ScaleFn`. Raises ShardingError for integers, which a factor would round in silence."""
    if not target.dtype.is_floating:
        raise ShardingError(f"cannot scale {target!r}", hint="scale a floating element type", value=target.dtype.value)
    _replace(target, _scale(target.raw, factor))


def cast(source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
    """See `CastFn`."""
    if rounding is None:
        out.copy_from(source)
    else:
        _write(out, jnp.array(source.raw), rounding)


def square_sums(out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
    """See `SquareSumsFn`."""
    for index, piece in pieces:
        _replace(out, _add_squares(out.raw, piece.raw, index))


def update(
    rule: Rule,
    master: Buffer,
    grad: Buffer,
    states: Sequence[Buffer],
    out: Buffer | None = None,
    grad_scale: float = 1.0,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `UpdateFn`."""
    rule.check(master, grad, states, out)
    formula = rule.formula
    kept = tuple(state.raw for state in states[: len(formula.reads)])
    if formula.writes_weights:
        weights, *after = _update(formula, rule.constants, _weights(master, rounding), grad.raw, kept, grad_scale)
        if out is not None:
            _write(out, jnp.array(weights), rounding)
        _write(master, weights, rounding)
    else:
        after = _update_states(formula, rule.constants, master.raw, grad.raw, kept, grad_scale)
    for state, array in zip(states, after, strict=True):
        _replace(state, array)


def _weights(master: Buffer, rounding: StochasticRounding | None) -> Any:
    """The master weights for an update, widened to float32 where its results will be rounded stochastically."""
    return master.raw if rounding is None else master.raw.astype(jnp.promote_types(master.raw.dtype, jnp.float32))


def _write(buffer: Buffer, values: Any, rounding: StochasticRounding | None) -> None:
    """Let `buffer` point to `values` in the buffer's type. No other buffer may hold `values`."""
    if rounding is not None and buffer.dtype.itemsize == 2 and buffer.dtype.is_floating:
        start = np.uint32(rounding.start & 0xFFFFFFFF)
        values = _narrowed(values, buffer.raw.dtype, *map(np.uint32, halves(rounding.key)), start)
    _replace(buffer, values)


def _replace(buffer: Any, array: Any) -> None:
    buffer.put(array)
