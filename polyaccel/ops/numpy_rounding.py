"""Weights on numpy arrays in their own type: to nearest even, or stochastically; see [Note: Stochastic rounding]."""

from __future__ import annotations

from collections.abc import Callable
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
    halves = float16_bits if target.dtype == np.float16 else bfloat16_bits
    target.view(np.uint16)[:] = halves(bits, random, np.where)


def bfloat16_bits(bits: Any, random: Any, where: Callable[..., Any]) -> Any:
    """The float32 numbers `bits` as bfloat16, in the lower 16 of uint32. Arrays are numpy's or JAX's, as `where` is."""
    magnitude = bits & 0x7FFFFFFF
    rounded = bits + where(magnitude > 0x7F7F0000, np.uint32(0x8000), random >> 16)
    return where(magnitude > 0x7F800000, bits >> 16 | 0x40, rounded >> 16)


def float16_bits(bits: Any, random: Any, where: Callable[..., Any]) -> Any:
    """As `bfloat16_bits`, as float16."""
    magnitude = bits & 0x7FFFFFFF
    normal = magnitude + where(magnitude > 0x477FE000, np.uint32(0x1000), random >> 19) - np.uint32(112 << 23) >> 13
    special = 0x7C00 | where(magnitude > 0x7F800000, 0x200 | magnitude >> 13 & 0x3FF, 0)
    is_small = magnitude < 0x38800000
    # In units of 2**-24 with 21 binary places.
    small = where(is_small, magnitude, np.uint32(0)).view(np.float32)
    places = (small * np.float32(2.0**45)).astype(np.uint32)
    found = where(magnitude >= 0x47800000, special, where(is_small, places + (random >> 11) >> 21, normal))
    return bits >> 16 & 0x8000 | found
