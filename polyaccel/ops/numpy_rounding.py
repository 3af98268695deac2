"""Weights on numpy arrays in their own type: to nearest even, or stochastically; see [Note: Stochastic rounding]."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.ops.base import StochasticRounding
from polyaccel.ops.random_bits import random_bits

Array = npt.NDArray[Any]


def write_weights(target: Array, values: Array, rounding: StochasticRounding | None) -> None:
    """`target[:] = values` in `target`'s type; with `rounding`, whose `start` is the first element's, if it has 16
    bits."""
    if rounding is None or target.itemsize != 2:
        target[:] = values
        return
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    random = random_bits(rounding.key, rounding.start, bits.size)
    target.view(np.uint16)[:] = _float16(bits, random) if target.dtype == np.float16 else _bfloat16(bits, random)


def _bfloat16(bits: Array, random: Array) -> Array:
    magnitude = bits & 0x7FFFFFFF
    rounded = bits + np.where(magnitude > 0x7F7F0000, np.uint32(0x8000), random >> 16)
    found: Array = np.where(magnitude > 0x7F800000, bits >> 16 | 0x40, rounded >> 16)
    return found


def _float16(bits: Array, random: Array) -> Array:
    magnitude = bits & 0x7FFFFFFF
    normal = magnitude + np.where(magnitude > 0x477FE000, np.uint32(0x1000), random >> 19) - np.uint32(112 << 23) >> 13
    special = 0x7C00 | np.where(magnitude > 0x7F800000, 0x200 | magnitude >> 13 & 0x3FF, 0)
    is_small = magnitude < 0x38800000
    # In units of 2**-24 with 21 binary places.
    places = (np.where(is_small, magnitude, 0).astype(np.uint32).view(np.float32) * np.float32(2.0**45)).astype(
        np.uint32
    )
    found: Array = np.where(magnitude >= 0x47800000, special, np.where(is_small, places + (random >> 11) >> 21, normal))
    return bits >> 16 & 0x8000 | found
