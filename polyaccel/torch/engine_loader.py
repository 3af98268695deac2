"""What loaders of an engine have in common: a position, seeds of workers, and the epochs of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch

_T = TypeVar("_T")
_PRIME = 1_000_003


class EngineLoader:
    """A loader that an engine builds. The state of one rank is that of all, and any number of them continues there."""

    state_is_shared: ClassVar[bool] = True


class PositionedLoader(EngineLoader):
    """A loader whose state is an epoch and a position in it, in samples of all ranks."""

    def __init__(self, *, micro_batch_size: int, rank: int, world_size: int, seed: int) -> None:
        self.micro_batch_size, self.rank, self.world_size, self.seed = micro_batch_size, rank, world_size, seed
        self.epoch, self.position = 0, 0
        self._resuming = False
        self._worker_seeds = torch.Generator()

    @property
    def global_batch_size(self) -> int:
        """Samples of a micro-batch of all ranks together."""
        return self.micro_batch_size * self.world_size

    def _begin(self) -> None:
        """Begin an iteration: a new epoch, unless a position was loaded."""
        if self.position and not self._resuming:
            self._end_epoch()
        self._resuming = False

    def _end_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def _seed_workers(self) -> None:
        # DataLoader draws one base seed an epoch from this generator and adds the worker's number to it.
        parts = ((self.seed * _PRIME + self.epoch) * _PRIME + self.position) * _PRIME + self.rank
        self._worker_seeds.manual_seed(parts % 2**63)

    def _stream_epoch(self, rest: Callable[[], Iterable[_T]]) -> Iterator[_T]:
        """Yield what is left of an epoch of a stream; of one that was resumed at its very end, the next epoch.

        `rest` settles the position and gives the micro-batches from there on.
        """
        handed_out = False
        while not handed_out:
            micro_batches = rest()
            is_resumed = self.position > 0
            for micro_batch in micro_batches:
                handed_out = True
                self.position += self.global_batch_size
                yield micro_batch
            self._end_epoch()
            if not is_resumed:
                return  # a whole epoch, even if it was empty


def announce_epoch(stream: Any, epoch: int) -> None:
    """Call a stream's `set_epoch`, if it has one."""
    set_epoch = getattr(stream, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
