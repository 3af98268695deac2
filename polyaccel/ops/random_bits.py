"""The bits that decide how a weight is rounded: the same on every device, whatever a kernel is given of a parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
SHIFTS = (17, 11, 15, 14)


def random_bits(key: int, start: int, numel: int) -> npt.NDArray[np.uint32]:
    """32 bits for each of the elements [start, start + numel), a function of `key` (64 bits) and the element's index.

    `triple32` of C. Wellons' hash-prospector, a bijection of 32 bits that was found by search for the least bias, with
    the halves of the key mixed in before and between. Indices count modulo 2**32. random_bits in csrc/numbers.h and
    `polyaccel.ops.torch_rounding` have the same.
    """
    low, high = map(np.uint32, halves(key))
    indices = np.arange(numel, dtype=np.uint32)
    indices += np.uint32(start & 0xFFFFFFFF)
    bits: npt.NDArray[np.uint32] = scramble(indices, low, high)
    return bits


def scramble(x: Any, low: Any, high: Any) -> Any:
    """The bits of the elements with the indices `x` under a key of these halves: uint32 of numpy, where `x` is written
    over, or of JAX."""
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
