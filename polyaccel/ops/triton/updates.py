"""One Triton kernel for every formula of `polyaccel.ops.optimizers`: load, compute in float32, store, in a single pass.

Products and sums are not fused (launch with `enable_fp_fusion=False`), divisions and roots are the correctly rounded
ones, and tails are masked: an element's result is the same bits wherever a slice starts or ends, and the same as the
host's kernels have ([Note: One rounding per operation] in csrc/kernels/updates.h). Memory is the limit, so that costs
nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyaccel.ops.triton.numbers import NOTHING, load, random_bits, store

SWEEPS = frozenset({"adamw", "adam", "lamb", "apply", "sgd", "momentum", "nesterov", "adagrad", "adamax", "lion"})
"""The formulas that `_updated` has."""


@triton.jit
def _direction(g, m, v, k0, k1, k2, k3, k4, k5, k6):
    """(both moments with `g`, Adam's direction)."""
    m = m * k0 + g * k1
    v = v * k2 + g * g * k3
    return m, v, tl.div_rn(m * k4, tl.sqrt_rn(v) * k5 + k6)


@triton.jit
def _updated(p, g, m, v, k0, k1, k2, k3, k4, k5, k6, k7, k8, FORMULA: tl.constexpr):
    """Return (weights, first state, second state, direction) in float32 by the formula's constants."""
    d = g
    if FORMULA == "adamw":
        m, v, d = _direction(g, m, v, k0, k1, k2, k3, k4, k5, k6)
        p = p * k8 - d * k7
    elif FORMULA == "adam":
        m, v, d = _direction(g + p * k8, m, v, k0, k1, k2, k3, k4, k5, k6)
        p = p - d * k7
    elif FORMULA == "lamb":
        m, v, d = _direction(g, m, v, k0, k1, k2, k3, k4, k5, k6)
        d = d + p * k8
    elif FORMULA == "apply":
        p = p - g * k0
    elif FORMULA == "sgd":
        p = p - (g + p * k3) * k0
    elif FORMULA == "momentum":
        g = g + p * k3
        m = tl.where(k4 != 0, g, m * k1 + g * k2)
        p = p - m * k0
    elif FORMULA == "nesterov":
        g = g + p * k3
        m = tl.where(k4 != 0, g, m * k1 + g * k2)
        p = p - (g + m * k1) * k0
    elif FORMULA == "adagrad":
        g = g + p * k2
        m = m + g * g
        p = p - tl.div_rn(g * k0, tl.sqrt_rn(m) + k1)
    elif FORMULA == "adamax":
        g = g + p * k5
        m = m * k0 + g * k1
        kept = v * k2
        magnitude = tl.abs(g) + k4
        v = tl.where((kept > magnitude) | (kept != kept), kept, magnitude)
        p = p - tl.div_rn(m * k3, v)
    elif FORMULA == "lion":
        blend = m * k0 + g * k1
        # The sign of NaN is NaN: a zero would freeze the parameter in silence.
        sign = tl.where(blend > 0, 1.0, tl.where(blend < 0, -1.0, blend))
        p = p * k5 - sign * k4
        m = m * k2 + g * k3
    else:
        tl.static_assert(FORMULA == "cast", "a formula without a branch here")
    return p, m, v, d


@triton.jit(do_not_specialize=["low", "high", "start"])
def sweep(
    weights, grad, first, second, direction, out, numel, low, high, start,
    k0, k1, k2, k3, k4, k5, k6, k7, k8, factor,
    FORMULA: tl.constexpr, WEIGHTS: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    DIRECTION: tl.constexpr, OUT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`numel` elements, BLOCK a program. The capitals give what each pointer points to; NOTHING is not touched."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    random = at
    if STOCHASTIC:
        random = random_bits(at, low, high, start)
    p = load(weights, at, mask, WEIGHTS)
    if GRAD != NOTHING:
        g = load(grad, at, mask, GRAD) * factor
        m, v = p, p
        if FIRST != NOTHING:
            m = load(first, at, mask, FIRST)
        if SECOND != NOTHING:
            v = load(second, at, mask, SECOND)
        p, m, v, d = _updated(p, g, m, v, k0, k1, k2, k3, k4, k5, k6, k7, k8, FORMULA)
        if FIRST != NOTHING:
            store(first, at, mask, m, random, FIRST, False)
        if SECOND != NOTHING:
            store(second, at, mask, v, random, SECOND, False)
        if DIRECTION != NOTHING:
            store(direction, at, mask, d, random, DIRECTION, False)
        else:
            store(weights, at, mask, p, random, WEIGHTS, STOCHASTIC)
    if OUT != NOTHING:
        store(out, at, mask, p, random, OUT, STOCHASTIC)


@triton.jit
def recorded_sweep(
    weights, grad, first, second, direction, out, numel, numbers,
    FORMULA: tl.constexpr, WEIGHTS: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    DIRECTION: tl.constexpr, OUT: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`sweep` whose COUNT constants, and the factor behind them, are float64 numbers in memory."""
    k0 = _number(numbers, 0, COUNT)
    k1 = _number(numbers, 1, COUNT)
    k2 = _number(numbers, 2, COUNT)
    k3 = _number(numbers, 3, COUNT)
    k4 = _number(numbers, 4, COUNT)
    k5 = _number(numbers, 5, COUNT)
    k6 = _number(numbers, 6, COUNT)
    k7 = _number(numbers, 7, COUNT)
    k8 = _number(numbers, 8, COUNT)
    factor = _number(numbers, COUNT, COUNT + 1)
    sweep(
        weights, grad, first, second, direction, out, numel, 0, 0, 0,
        k0, k1, k2, k3, k4, k5, k6, k7, k8, factor,
        FORMULA, WEIGHTS, GRAD, FIRST, SECOND, DIRECTION, OUT, False, BLOCK,
    )  # fmt: skip


@triton.jit
def _number(numbers, at: tl.constexpr, COUNT: tl.constexpr):
    """The number at `at` in float32; 0 behind the last."""
    if at < COUNT:
        number = tl.load(numbers + at).to(tl.float32)
    else:
        number = 0.0
    return number
