"""The ops on buffers that are handles to arrays of JAX: each computes new arrays, which the buffers then point to.

What is missing: stochastic rounding, which is refused, and quantised blocks. Arrays that are replaced are donated, so
their memory is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

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
    _refuse(rounding)
    out.copy_from(source)


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
    _refuse(rounding)
    terms = updates.adam_terms(hyper)
    arrays = (master.raw, grad.raw, exp_avg.raw, exp_avg_sq.raw)
    _keep((master, exp_avg, exp_avg_sq), _adam(*arrays, terms, grad_scale, decoupled=hyper.decoupled), out)


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
    _refuse(rounding)
    terms = updates.sgd_terms(hyper)
    average = None if momentum is None else momentum.raw
    found = _sgd(master.raw, grad.raw, average, terms, grad_scale, nesterov=hyper.nesterov)
    _keep((master,) if momentum is None else (master, momentum), found, out)


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
    _refuse(rounding)
    found = _adagrad(master.raw, grad.raw, sum_sq.raw, updates.adagrad_terms(hyper), grad_scale)
    _keep((master, sum_sq), found, out)


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
    _refuse(rounding)
    found = _lion(master.raw, grad.raw, exp_avg.raw, updates.lion_terms(hyper), grad_scale)
    _keep((master, exp_avg), found, out)


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
    found = _lamb_direction(*arrays, updates.adam_terms(hyper), grad_scale)
    _keep((direction, exp_avg, exp_avg_sq), found, None)
    master.mark_written()  # the contract lets kernels write it


def lamb_apply(
    master: Buffer, direction: Buffer, out: Buffer | None, rate: float, rounding: StochasticRounding | None = None
) -> None:
    """See `LambApplyFn`."""
    _refuse(rounding)
    _keep((master,), (_lamb_apply(master.raw, direction.raw, rate),), out)


def _keep(buffers: Sequence[Buffer], arrays: Sequence[Any], out: Buffer | None) -> None:
    """Let buffers have the new arrays, and `out` the first of them in its type."""
    for buffer, array in zip(buffers, arrays, strict=False):
        _replace(buffer, array)
    if out is not None:
        out.copy_from(buffers[0])


def _replace(buffer: Any, array: Any) -> None:
    buffer.put(array)


def _refuse(rounding: StochasticRounding | None) -> None:
    if rounding is not None:
        raise ShardingError(
            "devices that only JAX knows round to nearest",
            cure='set "stochastic_rounding" to false',
            value=rounding,
        )
