"""Memory through which something passes on its way between the device and the kernels of a tier."""

from __future__ import annotations

from polyaccel.accelerators.base import Stream
from polyaccel.buffer import Buffer
from polyaccel.offload.tier import Tier
from polyaccel.types import DType


class Staging:
    """One buffer of `most_numel` elements for each tier, use and type, made when it is first asked for.

    What comes from the device comes on `stream`, behind what it depends on and nothing else.
    """

    def __init__(self, most_numel: int, stream: Stream) -> None:
        self._most_numel = most_numel
        self.stream = stream
        self._buffers: dict[tuple[Tier, str, DType], Buffer] = {}

    def borrow(self, tier: Tier, use: str, numel: int, dtype: DType) -> Buffer:
        """`numel` elements where the kernels of `tier` reach them, undefined, until somebody else asks for the same."""
        buffer = self._buffers.get((tier, use, dtype))
        if buffer is None:
            buffer = self._buffers[tier, use, dtype] = tier.stage(self._most_numel, dtype)
        return buffer.view(0, numel)

    def clear(self) -> None:
        """Let go of everything."""
        self._buffers.clear()
