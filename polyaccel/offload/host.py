"""The host tier: states stand in the host's memory, and the host's kernels update them there."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from polyaccel.accelerators.base import Accelerator, Event
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.offload.tier import DoneFetch, Fetch, HostBackedTier, HostMemory, TierOptions


class HostTier(HostBackedTier):
    """Memory of the host; page-locked where `pin_memory` asks for it and the device can use it."""

    name = "host"

    def __init__(self) -> None:
        super().__init__()
        self._fetched: Event | None = None
        """After the last fetch, in the stream that copies."""

    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        self._memory = HostMemory(accelerator, host, pin=options.pin_memory)

    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        return self._opened.allocate(numel, dtype)

    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        device = self._opened.queues_for
        if device is None:
            return super().fetch(source, target)
        target.start_copy(source)
        self._fetched = device.current_stream().record()
        return DoneFetch()

    def end_fetches(self) -> None:
        fetched, self._fetched = self._fetched, None
        if fetched is not None and not fetched.is_reached():
            fetched.synchronize()

    def stream_groups(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        for group in groups:
            yield list(group)

    def close(self) -> None:
        self._memory = self._fetched = None
