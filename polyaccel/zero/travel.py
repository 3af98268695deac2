"""How sharded parameters and gradients travel, and how many bytes that is (ZeRO++, Wang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyaccel.types import DType

Bits = Literal[4, 8]
BLOCK_NUMEL = 256
"""Elements that share a scale."""
_SCALE_NBYTES = 4


@dataclass(frozen=True, slots=True)
class TravelPolicy:
    """Bits an element of what is gathered for a pass, trained or frozen, and of gradients; None: their own types.

    With `near_ranks` above 1, so many neighbouring ranks keep a second copy of what was gathered first in a step among
    them, and gather it again from each other.
    """

    trained_bits: Bits | None = None
    frozen_bits: Bits | None = None
    gradient_bits: Bits | None = None
    near_ranks: int = 1

    def gathered_bits(self, *, trainable: bool) -> Bits | None:
        return self.trained_bits if trainable else self.frozen_bits


AS_THEY_ARE = TravelPolicy()


def part_nbytes(numel: int, dtype: DType, bits: Bits | None) -> int:
    """Bytes of one rank's part of a bucket on its way."""
    if bits is None:
        return numel * dtype.itemsize
    return (numel * bits + 7) // 8 + -(-numel // BLOCK_NUMEL) * _SCALE_NBYTES
