"""Where states rest between uses: a `Tier` holds buffers, and fetches them to the device or evicts them from it.

The device tier, where everything stays in place, is the only one so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.buffer import Buffer
from polyaccel.types import DType


class Tier(ABC):
    """A place for buffers. `fetch` and `evict` are no-ops where the place is the device itself."""

    API_VERSION: ClassVar[tuple[int, int]] = (1, 0)
    name: ClassVar[str]

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="always there")

    @abstractmethod
    def open(self, accelerator: Accelerator) -> None:
        """Make ready to hold buffers of `accelerator`'s device."""

    @abstractmethod
    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """Zeroed memory in this tier."""

    @abstractmethod
    def fetch(self, buffer: Buffer) -> Buffer:
        """The contents where kernels can reach them."""

    @abstractmethod
    def evict(self, buffer: Buffer, fetched: Buffer) -> None:
        """Take back what `fetch` gave, with its changes."""

    @abstractmethod
    def close(self) -> None: ...
