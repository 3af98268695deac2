"""One Triton kernel for every update of `polyaccel.ops.fused`: load, compute in float32, store, in a single pass.

Products and sums are not fused (launch with `enable_fp_fusion=False`), divisions and roots are the correctly rounded
ones, and tails are masked: an element's result is the same bits wherever a slice starts or ends, and the same as the
host's kernels have ([Note: One rounding an operation] in csrc/updates.h). Memory is the limit, so it costs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyaccel.ops.fused import Update
from polyaccel.ops.triton_numbers import NOTHING, load, random_bits, store

_ADAM_DECOUPLED = tl.constexpr(int(Update.ADAM_DECOUPLED))
_ADAM_L2 = tl.constexpr(int(Update.ADAM_L2))
_SGD_PLAIN = tl.constexpr(int(Update.SGD_PLAIN))
_SGD_FIRST = tl.constexpr(int(Update.SGD_FIRST))
_SGD_MOMENTUM = tl.constexpr(int(Update.SGD_MOMENTUM))
_SGD_FIRST_NESTEROV = tl.constexpr(int(Update.SGD_FIRST_NESTEROV))
_SGD_NESTEROV = tl.constexpr(int(Update.SGD_NESTEROV))
_ADAGRAD = tl.constexpr(int(Update.ADAGRAD))
_LION = tl.constexpr(int(Update.LION))
_LAMB_DIRECTION = tl.constexpr(int(Update.LAMB_DIRECTION))
_LAMB_APPLY = tl.constexpr(int(Update.LAMB_APPLY))


@triton.jit(do_not_specialize=["low", "high", "start"])
def sweep(
    weights, grad, first, second, direction, out, numel, low, high, start,
    k0, k1, k2, k3, k4, k5, k6, k7, k8, k9,
    UPDATE: tl.constexpr, WEIGHTS: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    DIRECTION: tl.constexpr, OUT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`numel` elements, BLOCK a program. The capitals say what each pointer points to; NOTHING is not touched."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    random = at
    if STOCHASTIC:
        random = random_bits(at, low, high, start)
    p = load(weights, at, mask, WEIGHTS)
    if GRAD != NOTHING:
        g = load(grad, at, mask, GRAD)
        m, v = p, p
        if FIRST != NOTHING:
            m = load(first, at, mask, FIRST)
        if SECOND != NOTHING:
            v = load(second, at, mask, SECOND)

        if UPDATE == _ADAM_DECOUPLED or UPDATE == _ADAM_L2 or UPDATE == _LAMB_DIRECTION:
            g = g * k9
            if UPDATE == _ADAM_L2:
                g = g + p * k8
            m = m * k0 + g * k1
            v = v * k2 + g * g * k3
            d = tl.div_rn(m * k4, tl.sqrt_rn(v) * k5 + k6)
            if UPDATE == _LAMB_DIRECTION:
                store(direction, at, mask, d + p * k8, random, DIRECTION, False)
            else:
                if UPDATE == _ADAM_DECOUPLED:
                    p = p * k8
                p = p - d * k7
        elif UPDATE == _ADAGRAD:
            g = g * k3 + p * k2
            m = m + g * g
            p = p - tl.div_rn(g * k0, tl.sqrt_rn(m) + k1)
        elif UPDATE == _LION:
            g = g * k6
            blend = m * k0 + g * k1
            # The sign of NaN is NaN: a zero would freeze the parameter in silence.
            sign = tl.where(blend > 0, 1.0, tl.where(blend < 0, -1.0, blend))
            p = p * k5 - sign * k4
            m = m * k2 + g * k3
        elif UPDATE == _LAMB_APPLY:
            p = p - g * k0
        else:
            g = g * k4 + p * k3
            if UPDATE == _SGD_FIRST or UPDATE == _SGD_FIRST_NESTEROV:
                m = g
            elif UPDATE == _SGD_MOMENTUM or UPDATE == _SGD_NESTEROV:
                m = m * k1 + g * k2
            step = g
            if UPDATE == _SGD_FIRST_NESTEROV or UPDATE == _SGD_NESTEROV:
                step = g + m * k1
            elif UPDATE != _SGD_PLAIN:
                step = m
            p = p - step * k0

        if FIRST != NOTHING:
            store(first, at, mask, m, random, FIRST, False)
        if SECOND != NOTHING:
            store(second, at, mask, v, random, SECOND, False)
        if UPDATE != _LAMB_DIRECTION:
            store(weights, at, mask, p, random, WEIGHTS, STOCHASTIC)
    if OUT != NOTHING:
        store(out, at, mask, p, random, OUT, STOCHASTIC)
