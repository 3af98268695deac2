"""Optimizer updates as pure functions on flat arrays of JAX: what a compiled step does where others call kernels.

Each takes arrays of equal length and returns new ones in their types; `polyaccel.ops.reference` has the meaning. The
arithmetic is in float32, in float64 where the master weights are. `grad` is multiplied by `grad_scale`.

What depends on hyperparameters alone is in a tuple of *terms*, made from them on the host in float64: `1 - beta2**step`
would lose half its digits in float32. A term is a number, or an array with a value an element where parameters differ.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyaccel.ops.base import AdagradHyper, AdamHyper, LionHyper, SgdHyper

_ROW_NUMEL = 32


class AdamTerms(NamedTuple):
    """`keep` is what decoupled decay leaves of a weight, `decay` what of it joins the gradient; `correction1` and
    `correction2` are what the mean, and the root of the mean square, are multiplied with against their bias."""

    lr: Any
    keep: Any
    decay: Any
    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any
    correction1: Any
    correction2: Any
    eps: Any


class SgdTerms(NamedTuple):
    lr: Any
    decay: Any
    momentum: Any
    rest: Any
    first: Any


class AdagradTerms(NamedTuple):
    rate: Any
    decay: Any
    eps: Any


class LionTerms(NamedTuple):
    lr: Any
    keep: Any
    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any


def adam_terms(hyper: AdamHyper) -> AdamTerms:
    corrects = hyper.bias_correction
    return AdamTerms(
        lr=hyper.lr,
        keep=1.0 - hyper.lr * hyper.weight_decay,
        decay=hyper.weight_decay,
        beta1=hyper.beta1,
        rest1=1.0 - hyper.beta1,
        beta2=hyper.beta2,
        rest2=1.0 - hyper.beta2,
        correction1=1.0 / (1.0 - hyper.beta1**hyper.step) if corrects else 1.0,
        correction2=1.0 / sqrt(1.0 - hyper.beta2**hyper.step) if corrects else 1.0,
        eps=hyper.eps,
    )


def sgd_terms(hyper: SgdHyper) -> SgdTerms:
    return SgdTerms(hyper.lr, hyper.weight_decay, hyper.momentum, 1.0 - hyper.dampening, hyper.first)


def adagrad_terms(hyper: AdagradHyper) -> AdagradTerms:
    return AdagradTerms(hyper.lr / (1.0 + (hyper.step - 1) * hyper.lr_decay), hyper.weight_decay, hyper.eps)


def lion_terms(hyper: LionHyper) -> LionTerms:
    keep = 1.0 - hyper.lr * hyper.weight_decay
    return LionTerms(hyper.lr, keep, hyper.beta1, 1.0 - hyper.beta1, hyper.beta2, 1.0 - hyper.beta2)


def adam(
    master: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, terms: AdamTerms, grad_scale: Any, *, decoupled: bool
) -> tuple[Any, Any, Any]:
    """New (master, exp_avg, exp_avg_sq)."""
    weights, g = _widened(master, grad, grad_scale)
    if decoupled:
        weights = weights * terms.keep
    else:
        g = g + weights * terms.decay
    direction, m, v = _moments(g, exp_avg.astype(g.dtype), exp_avg_sq.astype(g.dtype), terms)
    return (
        (weights - direction * terms.lr).astype(master.dtype),
        m.astype(exp_avg.dtype),
        v.astype(exp_avg_sq.dtype),
    )


def sgd(
    master: Any, grad: Any, momentum: Any | None, terms: SgdTerms, grad_scale: Any, *, nesterov: bool
) -> tuple[Any, Any | None]:
    """New (master, momentum); without momentum where that is None."""
    weights, g = _widened(master, grad, grad_scale)
    g = g + weights * terms.decay
    if momentum is None:
        return (weights - g * terms.lr).astype(master.dtype), None
    average = jnp.where(terms.first, g, momentum.astype(g.dtype) * terms.momentum + g * terms.rest)
    step = g + average * terms.momentum if nesterov else average
    return (weights - step * terms.lr).astype(master.dtype), average.astype(momentum.dtype)


def adagrad(master: Any, grad: Any, sum_sq: Any, terms: AdagradTerms, grad_scale: Any) -> tuple[Any, Any]:
    """New (master, sum_sq)."""
    weights, g = _widened(master, grad, grad_scale)
    g = g + weights * terms.decay
    total = sum_sq.astype(g.dtype) + g * g
    return (weights - g * terms.rate / (jnp.sqrt(total) + terms.eps)).astype(master.dtype), total.astype(sum_sq.dtype)


def lion(master: Any, grad: Any, exp_avg: Any, terms: LionTerms, grad_scale: Any) -> tuple[Any, Any]:
    """New (master, exp_avg)."""
    weights, g = _widened(master, grad, grad_scale)
    average = exp_avg.astype(g.dtype)
    direction = jnp.sign(average * terms.beta1 + g * terms.rest1)
    after = average * terms.beta2 + g * terms.rest2
    return (weights * terms.keep - direction * terms.lr).astype(master.dtype), after.astype(exp_avg.dtype)


def lamb_direction(
    master: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, terms: AdamTerms, grad_scale: Any
) -> tuple[Any, Any, Any]:
    """(direction with decay, new exp_avg, new exp_avg_sq)."""
    weights, g = _widened(master, grad, grad_scale)
    direction, m, v = _moments(g, exp_avg.astype(g.dtype), exp_avg_sq.astype(g.dtype), terms)
    return direction + weights * terms.decay, m.astype(exp_avg.dtype), v.astype(exp_avg_sq.dtype)


def lamb_apply(master: Any, direction: Any, rate: Any) -> Any:
    """The new master."""
    weights, step = _widened(master, direction, rate)
    return (weights - step).astype(master.dtype)


def precise_sum(values: Any) -> Any:
    """The sum by rows of rows: its error grows with the logarithm of the length, where XLA may add one after another.
    The barrier keeps XLA from making one sum of all."""
    while values.size > _ROW_NUMEL:
        padded = jnp.pad(values, (0, -values.size % _ROW_NUMEL))
        values = jax.lax.optimization_barrier(jnp.sum(padded.reshape(-1, _ROW_NUMEL), axis=1))
    return jnp.sum(values)


def _widened(master: Any, grad: Any, grad_scale: Any) -> tuple[Any, Any]:
    """(weights, `grad * grad_scale`) in the type to compute in."""
    wide = jnp.float64 if master.dtype == jnp.float64 else jnp.float32
    return master.astype(wide), grad.astype(wide) * jnp.asarray(grad_scale, wide)


def _moments(g: Any, exp_avg: Any, exp_avg_sq: Any, terms: AdamTerms) -> tuple[Any, Any, Any]:
    """(direction, mean, mean square), both means with `g`; the direction is freed of their bias."""
    m = exp_avg * terms.beta1 + g * terms.rest1
    v = exp_avg_sq * terms.beta2 + g * g * terms.rest2
    return m * terms.correction1 / (jnp.sqrt(v) * terms.correction2 + terms.eps), m, v
