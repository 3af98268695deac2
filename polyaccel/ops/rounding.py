"""Stochastic rounding of float32 numbers to 16 bits; see [Note: Stochastic rounding] in `polyaccel.ops.base`.

These functions compute with the integers of numpy or JAX. csrc, torch and Triton have their own functions, which give
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
SHIFTS = (17, 11, 15, 14)


def random_bits(key: int, start: int, numel: int) -> npt.NDArray[np.uint32]:
    """32 bits for each of the elements [start, start + numel), a function of `key` (64 bits) and the element's index.

    `triple32` of C. Wellons' hash-prospector, a bijection of 32 bits that was found by search for the least bias, with
    the halves of the key mixed in before and between. Indices count modulo 2**32. `random_bits` in
    csrc/kernels/numbers.h and the kernels of torch and Triton give the same bits.
    """
    low, high = map(np.uint32, halves(key))
    indices = np.arange(numel, dtype=np.uint32)
    indices += np.uint32(start & 0xFFFFFFFF)
    bits: npt.NDArray[np.uint32] = scramble(indices, low, high)
    return bits


def scramble(x: Any, low: Any, high: Any) -> Any:
    """Return random bits for indices `x` and key halves `low`, `high`: uint32, numpy's overwritten, or JAX."""
    x ^= low
    for round_, (shift, multiplier) in enumerate(zip(SHIFTS, MULTIPLIERS, strict=False)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(multiplier)
        if round_ == 0:
            x += high
    x ^= x >> np.uint32(SHIFTS[-1])
    return x


def halves(key: int) -> tuple[int, int]:
    """The lower and the upper 32 bits of a key."""
    return key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF


def bfloat16_bits(bits: Any, random: Any, where: Callable[..., Any]) -> Any:
    """The bits of bfloat16 numbers, as uint32, that the float32 numbers with these `bits` round to.

    `random` has 32 random bits an element. `where` is numpy's or JAX's, as the arrays are.
    """
    magnitude = bits & 0x7FFFFFFF
    rounded = bits + where(magnitude > 0x7F7F0000, np.uint32(0x8000), random >> 16)
    return where(magnitude > 0x7F800000, bits >> 16 | 0x40, rounded >> 16)


def float16_bits(bits: Any, random: Any, where: Callable[..., Any]) -> Any:
    """The same as `bfloat16_bits` for float16."""
    magnitude = bits & 0x7FFFFFFF
    normal = magnitude + where(magnitude > 0x477FE000, np.uint32(0x1000), random >> 19) - np.uint32(112 << 23) >> 13
    special = 0x7C00 | where(magnitude > 0x7F800000, 0x200 | magnitude >> 13 & 0x3FF, 0)
    is_small = magnitude < 0x38800000
    # In units of 2**-24 with 21 binary places.
    small = where(is_small, magnitude, np.uint32(0)).view(np.float32)
    places = (small * np.float32(2.0**45)).astype(np.uint32)
    found = where(magnitude >= 0x47800000, special, where(is_small, places + (random >> 11) >> 21, normal))
    return bits >> 16 & 0x8000 | found
