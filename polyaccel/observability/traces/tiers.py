"""Offload tiers in a trace: what was fetched, and what an update waited for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import time

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.observability.traces.recorder import RunTrace
from polyaccel.offload.tier import Fetch, Tier, TierOptions


class TracedTier(Tier):
    """`inner`, whose transfers are recorded in `trace` while it is on: each fetch from its start to its end, and each
    group of a walk from when it was asked for until it was there. `waited_s` is how long the rank did nothing else."""

    def __init__(self, inner: Tier, trace: RunTrace) -> None:
        self.inner = inner
        self._trace = trace
        self.name = inner.name  # type: ignore[misc]  # a class has one name, this attribute is for one tier
        self.is_resident = inner.is_resident  # type: ignore[misc]

    @property
    def compute(self) -> Accelerator:
        return self.inner.compute

    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        self.inner.open(accelerator, host, options)

    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        return self.inner.allocate(key, numel, dtype)

    def stage(self, numel: int, dtype: DType) -> Buffer:
        return self.inner.stage(numel, dtype)

    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        if not self._trace.is_on:
            return self.inner.fetch(source, target)
        began_s = time()
        return _TracedFetch(self.inner.fetch(source, target), self, began_s, source.nbytes)

    def stream_groups(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        walk = self.inner.stream_groups(groups)
        if not self._trace.is_on:
            yield from walk
            return
        try:
            for at, group in enumerate(groups):
                began_s = time()
                lent = next(walk)
                self.tell(f"read group {at}", began_s, time(), began_s, sum(buffer.nbytes for buffer in group))
                yield lent
            began_s = time()
            for _ in walk:
                pass
            self.tell("end of the walk", began_s, time(), began_s, 0)
        finally:
            walk.close()

    def close(self) -> None:
        self.inner.close()

    def tell(self, what: str, began_s: float, ended_s: float, waited_since_s: float, nbytes: int) -> None:
        """Record a transfer that was waited for since a moment."""
        more = {"tier": self.name, "nbytes": nbytes, "waited_s": max(0.0, ended_s - waited_since_s)}
        self._trace.span("tier", f"{self.name}: {what}", began_s, ended_s, **more)


class _TracedFetch(Fetch):
    def __init__(self, inner: Fetch, tier: TracedTier, began_s: float, nbytes: int) -> None:
        self._inner = inner
        self._tier = tier
        self._began_s = began_s
        self._nbytes = nbytes

    def finish(self) -> None:
        waits_s = time()
        self._inner.finish()
        self._tier.tell("fetch", self._began_s, time(), waits_s, self._nbytes)

    def cancel(self) -> None:
        self._inner.cancel()
