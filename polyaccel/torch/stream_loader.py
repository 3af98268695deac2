"""Loader of a stream that all ranks read whole, whose position continues at any number of ranks.

[Note: Positions in streams]
Micro-batch k of all ranks is the stream's next `micro_batch_size * world_size` samples, dealt out in turn: sample i of
them goes to rank i % world_size. A position is the number of samples that all ranks have had in this epoch. What fills
no micro-batch on all ranks at the end of the stream is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from polyaccel.core.tagged_json import is_serializable
from polyaccel.data.streams import WholeStream
from polyaccel.errors import CheckpointError, ConfigError, Problem
from polyaccel.torch.data import EngineLoader

_LOG = logging.getLogger(__name__)
_PRIME = 1_000_003


class StreamDataLoader(EngineLoader):
    """Micro-batches of this rank from a `WholeStream`. See [Note: Positions in streams].

    One iteration is one epoch. Each `iter` begins a new epoch, even if the last one was not finished; only the first
    one after `load_state_dict` continues there.

    Args:
        stream: The stream, with the same samples on all ranks.
        micro_batch_size: Samples of a micro-batch on this rank.
        rank: This rank among the ranks that share the stream.
        world_size: Number of these ranks.
        seed: Seed of the process that reads, where there is one.
        collate_fn: Makes a batch from a list of samples; None is torch's default.
        num_workers: 1 reads in another process, 0 in this one.
        pin_memory: Copy batches to page-locked host memory.

    Raises:
        ConfigError: There is more than one worker: they would divide the stream among themselves.
    """

    def __init__(
        self,
        stream: WholeStream,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if num_workers > 1:
            hint = "use 1, or 0 to read in this process"
            raise ConfigError([Problem("num_workers", num_workers, "would divide a whole stream", hint)])
        self.dataset, self.micro_batch_size, self.rank, self.world_size = stream, micro_batch_size, rank, world_size
        self.seed, self.epoch, self.position = seed, 0, 0
        self._global = micro_batch_size * world_size
        self._resuming = False
        self._begin: Any = None
        """The stream's own state to begin with; None begins at its beginning."""
        self._knows_state = stream.resumes_by_state and num_workers == 0
        self._reads = False
        self._worker_seeds = torch.Generator()
        self._arguments: dict[str, Any] = {
            "batch_size": micro_batch_size,
            "drop_last": True,
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
        }

    def __iter__(self) -> Iterator[Any]:
        if self.position and not self._resuming:
            self._end_epoch()
        self._resuming = False
        stream = self.dataset.stream
        handed_out = False
        while not handed_out:
            seen, begin = self.position, self._begin
            set_epoch = getattr(stream, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
            if begin is not None:
                stream.load_state_dict(begin)  # type: ignore[attr-defined]
            elif seen:
                _LOG.info("reading past %d samples of a stream to resume", seen)
            parts = (self.seed * _PRIME + self.epoch) * _PRIME + seen
            self._worker_seeds.manual_seed((parts * _PRIME + self.rank) % 2**63)
            dealt = _Dealt(self.dataset, self.rank, self.world_size, self._global, 0 if begin is not None else seen)
            loader: DataLoader[Any] = DataLoader(dealt, generator=self._worker_seeds, **self._arguments)
            self._reads = True
            for micro_batch in loader:
                handed_out = True
                self.position += self._global
                yield micro_batch
            self._end_epoch()
            if not seen:
                return  # a whole epoch, even if it was empty; resumed at its very end, there is the next one to give

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next micro-batch; it is equal on all ranks.

        Returns:
            Plain values, with the state of the stream where it resumes by that.

        Raises:
            CheckpointError: The state of the stream is not plain values.
        """
        own = None if self._reads else self._begin
        if self._knows_state and self._reads and self.position:
            own = self.dataset.stream.state_dict()  # type: ignore[attr-defined]
        if not is_serializable(own):
            raise CheckpointError(
                "the state of the stream is not of plain values",
                hint="leave resumes_by_state out: samples that were seen are then read again",
                value=type(own).__name__,
            )
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "stream": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a saved position.

        Args:
            state_dict: Result of `state_dict`, from any number of ranks and any micro-batch size.

        Raises:
            CheckpointError: It is of another kind of loader, or another seed.
        """
        if set(state_dict) != {"epoch", "position", "seed", "stream"} or state_dict["seed"] != self.seed:
            raise CheckpointError(
                f"the saved position in the training data is not one of this stream: {dict(state_dict)!r}",
                hint="resume with the same WholeStream and seed, or do not load the loader's state",
                value=sorted(state_dict),
            )
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]
        self._begin = state_dict["stream"] if self.dataset.resumes_by_state else None
        self._resuming, self._reads = True, False

    def _end_epoch(self) -> None:
        self.epoch, self.position, self._begin, self._reads = self.epoch + 1, 0, None, False


class _Dealt(IterableDataset[Any]):
    """This rank's samples of a stream, after the `seen` first ones; whole micro-batches of all ranks only."""

    def __init__(self, stream: WholeStream, rank: int, world_size: int, size: int, seen: int) -> None:
        super().__init__()
        self._stream, self._rank, self._world_size, self._size, self._seen = stream, rank, world_size, size, seen

    def __iter__(self) -> Iterator[Any]:
        samples = islice(iter(self._stream), self._seen, None)
        while len(part := list(islice(samples, self._size))) == self._size:
            yield from part[self._rank :: self._world_size]
