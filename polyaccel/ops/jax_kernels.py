"""The ops on buffers that are handles to arrays of JAX: each computes new arrays, which the buffers then point to.

Quantised blocks are missing. Arrays that are replaced are donated, so their memory is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.ops import jax_updates as updates
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    CAST,
    COMBINE,
    LAMB_APPLY,
    LAMB_DIRECTION,
    LION,
    SCALE,
    SGD,
    SQUARE_SUMS,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    LionHyper,
    SgdHyper,
    StochasticRounding,
)
from polyaccel.ops.jax_rounding import narrowed
from polyaccel.ops.random_bits import halves
from polyaccel.types import ReduceOp


def jax_kernels() -> KernelTable:
    """The table of these kernels."""
    return KernelTable(
        "jax",
        {
            COMBINE: combine,
            SCALE: scale,
            CAST: cast,
            SQUARE_SUMS: square_sums,
            ADAM: adam,
            SGD: sgd,
            ADAGRAD: adagrad,
            LION: lion,
            LAMB_DIRECTION: lamb_direction,
            LAMB_APPLY: lamb_apply,
        },
    )


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
_add_squares = _jit(
    lambda sums, piece, index: sums.at[index].add(updates.precise_sum(jnp.square(piece.astype(sums.dtype))))
)
_adam = jax.jit(updates.adam, donate_argnums=(0, 2, 3), static_argnames="decoupled")
_sgd = jax.jit(updates.sgd, donate_argnums=(0, 2), static_argnames="nesterov")
_adagrad = jax.jit(updates.adagrad, donate_argnums=(0, 2))
_lion = jax.jit(updates.lion, donate_argnums=(0, 2))
_lamb_direction = jax.jit(updates.lamb_direction, donate_argnums=(2, 3))
_lamb_apply = jax.jit(updates.lamb_apply, donate_argnums=0)


@partial(jax.jit, static_argnums=1)
def _narrowed(values: Any, dtype: Any, low: Any, high: Any, start: Any) -> Any:
    return narrowed(values, dtype, low, high, jax.lax.iota(jnp.uint32, values.size) + start)


def combine(target: Buffer, source: Buffer, op: ReduceOp) -> None:
    """See `CombineFn`. `source` is converted to `target`'s type first."""
    other = source.raw.astype(target.raw.dtype)
    _replace(target, _combine[op](target.raw, jnp.array(other) if other is target.raw else other))


def scale(target: Buffer, factor: float) -> None:
    """See `ScaleFn`. Raises ShardingError for integers, which a factor would round in silence."""
    if not target.dtype.is_floating:
        raise ShardingError(f"cannot scale {target!r}", cure="scale a floating element type", value=target.dtype.value)
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


def adam(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    out: Buffer | None,
    hyper: AdamHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `AdamFn`."""
    arrays = (_weights(master, rounding), grad.raw, exp_avg.raw, exp_avg_sq.raw)
    found = _adam(*arrays, updates.adam_terms(hyper), grad_scale, decoupled=hyper.decoupled)
    _keep((master, exp_avg, exp_avg_sq), found, out, rounding)


def sgd(
    master: Buffer,
    grad: Buffer,
    momentum: Buffer | None,
    out: Buffer | None,
    hyper: SgdHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `SgdFn`."""
    average = None if momentum is None else momentum.raw
    terms = updates.sgd_terms(hyper)
    found = _sgd(_weights(master, rounding), grad.raw, average, terms, grad_scale, nesterov=hyper.nesterov)
    _keep((master,) if momentum is None else (master, momentum), found, out, rounding)


def adagrad(
    master: Buffer,
    grad: Buffer,
    sum_sq: Buffer,
    out: Buffer | None,
    hyper: AdagradHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `AdagradFn`."""
    found = _adagrad(_weights(master, rounding), grad.raw, sum_sq.raw, updates.adagrad_terms(hyper), grad_scale)
    _keep((master, sum_sq), found, out, rounding)


def lion(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    out: Buffer | None,
    hyper: LionHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `LionFn`."""
    found = _lion(_weights(master, rounding), grad.raw, exp_avg.raw, updates.lion_terms(hyper), grad_scale)
    _keep((master, exp_avg), found, out, rounding)


def lamb_direction(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    direction: Buffer,
    hyper: AdamHyper,
    grad_scale: float,
) -> None:
    """See `LambDirectionFn`."""
    arrays = (master.raw, grad.raw, exp_avg.raw, exp_avg_sq.raw)
    _keep((direction, exp_avg, exp_avg_sq), _lamb_direction(*arrays, updates.adam_terms(hyper), grad_scale))
    master.mark_written()  # the contract lets kernels write it


def lamb_apply(
    master: Buffer, direction: Buffer, out: Buffer | None, rate: float, rounding: StochasticRounding | None = None
) -> None:
    """See `LambApplyFn`."""
    _keep((master,), (_lamb_apply(_weights(master, rounding), direction.raw, rate),), out, rounding)


def _weights(master: Buffer, rounding: StochasticRounding | None) -> Any:
    """What an update takes: float32 where it is to be rounded stochastically afterwards, and not before."""
    return master.raw if rounding is None else master.raw.astype(jnp.promote_types(master.raw.dtype, jnp.float32))


def _keep(
    buffers: Sequence[Buffer],
    arrays: Sequence[Any],
    out: Buffer | None = None,
    rounding: StochasticRounding | None = None,
) -> None:
    """Let buffers have the new arrays, weights first, and `out` the weights."""
    weights, *states = arrays
    if out is not None:
        _write(out, jnp.array(weights), rounding)
    _write(buffers[0], weights, rounding)
    for buffer, array in zip(buffers[1:], states, strict=False):
        _replace(buffer, array)


def _write(buffer: Buffer, values: Any, rounding: StochasticRounding | None) -> None:
    """Let `buffer` have `values`, an array of its own, in its type."""
    if rounding is not None and buffer.dtype.itemsize == 2 and buffer.dtype.is_floating:
        start = np.uint32(rounding.start & 0xFFFFFFFF)
        values = _narrowed(values, buffer.raw.dtype, *map(np.uint32, halves(rounding.key)), start)
    _replace(buffer, values)


def _replace(buffer: Any, array: Any) -> None:
    buffer.put(array)
