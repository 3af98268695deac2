"""Loads and stores of Triton kernels, which hold 16-bit floats as float32.

16-bit memory is passed as int16 and converted by integer operations, so that rounding gives the same bits on every
device and in Triton's interpreter; see [Note: Stochastic rounding] in `polyaccel.ops.base`. Other types are loaded and
stored as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyaccel.ops.rounding import MULTIPLIERS, SHIFTS

# What a pointer points to, as a constant of the kernel. NOTHING is for a buffer that a call has not.
NOTHING = tl.constexpr(-1)
PLAIN = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)

_FIRST, _SECOND, _THIRD = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_BY_FIRST, _BY_SECOND, _BY_THIRD, _BY_LAST = (tl.constexpr(shift) for shift in SHIFTS)


@triton.jit
def load(pointer, at, mask, KIND: tl.constexpr):
    """The numbers at `at`, zero where `mask` is off: float32, or their own type if PLAIN."""
    raw = tl.load(pointer + at, mask=mask, other=0)
    if KIND == BFLOAT16:
        values = (raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == FLOAT16:
        values = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = raw
    return values


@triton.jit
def store(pointer, at, mask, values, random, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store float32 `values` to nearest even, or by the `random` bits if STOCHASTIC and the type has 16 bits."""
    if KIND == BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        tl.store(pointer + at, _bfloat16(bits, random, STOCHASTIC).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    elif KIND == FLOAT16:
        if STOCHASTIC:
            narrow = _float16(values.to(tl.uint32, bitcast=True), random).to(tl.uint16).to(tl.int16, bitcast=True)
        else:
            narrow = values.to(tl.float16).to(tl.int16, bitcast=True)
        tl.store(pointer + at, narrow, mask=mask)
    else:
        tl.store(pointer + at, values, mask=mask)


@triton.jit
def random_bits(at, low, high, start):
    """See `polyaccel.ops.rounding`. `low`, `high` and `start` are int32, of which the bits count."""
    x = at.to(tl.uint32) + start.to(tl.uint32)
    x = x ^ low.to(tl.uint32)
    x = (x ^ (x >> _BY_FIRST)) * tl.full([], _FIRST, tl.uint32) + high.to(tl.uint32)
    x = (x ^ (x >> _BY_SECOND)) * tl.full([], _SECOND, tl.uint32)
    x = (x ^ (x >> _BY_THIRD)) * tl.full([], _THIRD, tl.uint32)
    return x ^ (x >> _BY_LAST)


@triton.jit
def _bfloat16(bits, random, STOCHASTIC: tl.constexpr):
    magnitude = bits & 0x7FFFFFFF
    to_nearest = ((bits >> 16) & 1) + 0x7FFF
    if STOCHASTIC:
        # Above the largest number there is none to be rounded up to by chance.
        added = tl.where(magnitude > 0x7F7F0000, 0x8000, random >> 16)
    else:
        added = to_nearest
    return tl.where(magnitude > 0x7F800000, (bits >> 16) | 0x40, (bits + added) >> 16)


@triton.jit
def _float16(bits, random):
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + tl.where(magnitude > 0x477FE000, 0x1000, random >> 19) - (112 << 23)) >> 13
    special = tl.where(magnitude > 0x7F800000, 0x7E00 | ((magnitude >> 13) & 0x3FF), 0x7C00)
    is_small = magnitude < 0x38800000
    # In units of 2**-24 with 21 binary places.
    small = tl.where(is_small, magnitude, 0).to(tl.float32, bitcast=True) * 35184372088832.0
    subnormal = (small.to(tl.uint32) + (random >> 11)) >> 21
    found = tl.where(magnitude >= 0x47800000, special, tl.where(is_small, subnormal, normal))
    return ((bits >> 16) & 0x8000) | found
