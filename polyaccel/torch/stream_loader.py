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

from torch.utils.data import DataLoader, IterableDataset

from polyaccel.core.tagged_json import is_serializable
from polyaccel.data.streams import WholeStream
from polyaccel.errors import CheckpointError, ConfigError, Problem
from polyaccel.torch.engine_loader import PositionedLoader, announce_epoch

_LOG = logging.getLogger(__name__)


class StreamDataLoader(PositionedLoader):
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
        super().__init__(micro_batch_size=micro_batch_size, rank=rank, world_size=world_size, seed=seed)
        self.dataset = stream
        self._saved: Any = None
        """The stream's own state to begin with; None begins at its beginning."""
        self._knows_state = stream.resumes_by_state and num_workers == 0
        self._reads = False
        self._arguments: dict[str, Any] = {
            "batch_size": micro_batch_size,
            "drop_last": True,
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
        }

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        return self._stream_epoch(self._rest_of_stream)

    def _rest_of_stream(self) -> Iterator[Any]:
        announce_epoch(self.dataset.stream, self.epoch)
        seen = self.position
        if self._saved is not None:
            self.dataset.stream.load_state_dict(self._saved)  # type: ignore[attr-defined]
            seen = 0
        elif seen:
            _LOG.info("reading past %d samples of a stream to resume", seen)
        self._seed_workers()
        dealt = _Dealt(self.dataset, self.rank, self.world_size, self.global_batch_size, seen)
        loader: DataLoader[Any] = DataLoader(dealt, generator=self._worker_seeds, **self._arguments)
        self._reads = True
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next micro-batch; it is equal on all ranks.

        Returns:
            Plain values, with the state of the stream where it resumes by that.

        Raises:
            CheckpointError: The state of the stream is not plain values.
        """
        own = None if self._reads else self._saved
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
        self._saved = state_dict["stream"] if self.dataset.resumes_by_state else None
        self._resuming, self._reads = True, False

    def _end_epoch(self) -> None:
        super()._end_epoch()
        self._saved, self._reads = None, False


class _Dealt(IterableDataset[Any]):
    """This rank's samples of a stream, after the `seen` first ones; whole micro-batches of all ranks only."""

    def __init__(self, stream: WholeStream, rank: int, world_size: int, size: int, seen: int) -> None:
        super().__init__()
        self._stream, self._rank, self._world_size, self._size, self._seen = stream, rank, world_size, size, seen

    def __iter__(self) -> Iterator[Any]:
        samples = islice(iter(self._stream), self._seen, None)
        while len(part := list(islice(samples, self._size))) == self._size:
            yield from part[self._rank :: self._world_size]
