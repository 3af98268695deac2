"""Where the micro-batches of a stage come from, and what of them the stage takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyaccel.errors import PolyaccelError
from polyaccel.torch.data import to_device

Pair = tuple[Any, Any]


class StageBatches:
    """The micro-batches of a stage: pairs of inputs and labels, of which the stage takes what it `needs`.

    `is_whole`: a micro-batch is not a pair, and is the inputs of a model with its own loss.
    """

    def __init__(self, needs: tuple[bool, bool], device: torch.device, *, is_whole: bool) -> None:
        self._needs_inputs, self._needs_labels = needs
        self._device = device
        self._is_whole = is_whole
        self.iterator: Any = None
        """What micro-batches are taken from where a call gives nothing."""
        self.batch_fn: Callable[[Any], Any] | None = None
        """What makes a micro-batch of what was taken."""
        self.pair_of: Callable[[Any], Pair] = pair_of
        self.watch: Callable[[Pair], object] | None = None
        """Called with what the stage takes of each micro-batch."""

    @property
    def are_needed(self) -> bool:
        return self._needs_inputs or self._needs_labels

    def take(self, source: Iterator[Any] | None, count: int) -> list[Pair]:
        """The next `count` micro-batches, on the device. A stage without a `source` gives `batch_fn` None; one that
        needs no data takes as many as the others, so that all come to the end of their data together."""
        taken = [self._taken(None if source is None else next(source)) for _ in range(count)]
        if self.watch is not None:
            for pair in taken:
                self.watch(pair)
        return taken

    def _taken(self, batch: Any) -> Pair:
        if not self.are_needed:
            return None, None
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if self._is_whole:
            return to_device(batch, self._device), None
        inputs, labels = self.pair_of(batch)
        return (
            to_device(inputs, self._device) if self._needs_inputs else None,
            to_device(labels, self._device) if self._needs_labels else None,
        )


def pair_of(batch: Any) -> Pair:
    """The inputs and the labels of a micro-batch. Raises PolyaccelError where it is not a pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise PolyaccelError(
            f"a micro-batch of a pipeline is a {kind}",
            hint="give pairs (inputs, labels), or let engine.set_batch_fn(fn) make them",
            value=kind,
        )
    return batch[0], batch[1]
