"""How the config cuts sequences over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OTHER_METHOD = (
    'set "sequence_parallel": {"method": "tokenwise"}, which cuts the tokens of feed-forward layers alone, or set '
    "sequence_parallel_size to 1"
)
"""The hint for models that neither Ulysses nor the ring can cut."""


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """How attention of a sequence is computed over ranks."""

    method: Literal["ulysses", "ring"] = "ulysses"
    """Ulysses exchanges heads, and has any attention in between; the ring sends keys and values round, and has no limit
    by the number of heads."""
    core_attention: str = "blockwise"
    """What computes attention between Ulysses's exchanges: "blockwise" (ours, whose memory grows with the length
    alone), or one of transformers' implementations: "eager", "sdpa", "flex_attention"."""
