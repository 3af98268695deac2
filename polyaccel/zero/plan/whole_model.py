"""The choice between one gather of all sharded parameters and gathers unit by unit, by the memory that ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

USABLE_SHARE = 0.5
"""The share of free memory, without the cache of keys and values, that gathered parameters may take: activations need
the rest."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory of one rank. `place` is equal for ranks that share it, `needed_nbytes` is what whole parameters take, and
    `cache_nbytes` what the rollout's keys and values take."""

    place: str
    needed_nbytes: int
    free_nbytes: int
    cache_nbytes: int = 0


def fits_whole(ranks: Sequence[FreeMemory]) -> bool:
    """Return whether all ranks can hold whole parameters at once."""
    for place in {rank.place for rank in ranks}:
        here = [rank for rank in ranks if rank.place == place]
        needed = sum(rank.needed_nbytes for rank in here)
        cache = sum(rank.cache_nbytes for rank in here)
        if needed > USABLE_SHARE * max(0, min(rank.free_nbytes for rank in here) - cache):
            return False
    return True
