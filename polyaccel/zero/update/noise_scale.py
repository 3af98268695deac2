"""The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), from norms of parts of a batch.

The mean gradient of a part of the batch has a larger expected squared norm than that of the whole batch, by the
variance of its samples. With n parts, of which one has the squared norm `part` on average, and `whole`:

    variance of the batch's gradient = (part - whole) / (n - 1), squared true gradient = (n * whole - part) / (n - 1)

Their ratio, each smoothed over steps, times the samples of a batch is the noise scale: the batch size from which on
larger ones gain less than half. A part is what a rank gives to one reduction: its micro-batch where gradients are
sharded, its share of the batch where they are not. One rank alone that adds micro-batches up has the first of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from math import isfinite

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.zero.buckets.grad_reducer import GradReducer
from polyaccel.zero.update.grad_norm import SquareSums, allocate_sums, read_sums, write_sums


class NoiseMeter:
    """Measures what ranks give to reductions. `replicas` ranks have other samples than the rest; `decay` smooths."""

    def __init__(
        self, reducer: GradReducer, accelerator: Accelerator, communicator: Communicator, replicas: int, decay: float
    ) -> None:
        self._accelerator = accelerator
        self._communicator = communicator
        self.replicas = replicas
        self._decay = decay
        self._holders = [gradients.bucket.world_size for gradients in reducer.buckets]
        self._noise = self._signal = 0.0
        self.forget()
        for index, gradients in enumerate(reducer.buckets):
            gradients.meter = partial(self._add, index)
        reducer.meter = self

    def forget(self) -> None:
        """Begin a step."""
        self._sums = SquareSums(len(self._holders))
        self._first = SquareSums(len(self._holders))
        self._launches = [0] * len(self._holders)
        self._passes = 0

    def _add(self, index: int, source: Buffer) -> None:
        self._sums.add(self._accelerator, [(index, source)])
        self._launches[index] += 1

    def count_pass(self, held: Sequence[Sequence[Buffer]]) -> None:
        """Count a backward pass, after which `held` has what is not reduced yet, by bucket."""
        self._passes += 1
        if self._passes == 1:
            for index, buffers in enumerate(held):
                self._first.add(self._accelerator, [(index, buffer) for buffer in buffers])

    def take(self, loss_scale: float) -> tuple[int, float] | None:
        """The parts of the batch and the mean squared norm of one; None where there is one part. Collective."""
        launches = max(self._launches, default=0)
        sums, count, factor = self._sums, launches * self.replicas, launches / loss_scale**2
        if count == 1 and self._passes > 1:
            sums, count, factor = self._first, self._passes, (self._passes / loss_scale) ** 2
        if count < 2:
            return None
        total = sum(value / holders for value, holders in zip(sums.read(), self._holders, strict=True))
        vector = allocate_sums(self._communicator.accelerator, self._communicator, 1)
        write_sums(vector, array("d", [total]))
        self._communicator.all_reduce(vector, label="squares of parts of the batch")
        return count, factor * read_sums(vector)[0]

    def ratio(self, parts: tuple[int, float] | None, norm: float) -> float | None:
        """The noise scale in batches, with a step whose gradient has this `norm`; None where it is not known yet."""
        if parts is not None and isfinite(norm) and isfinite(parts[1]):
            count, part = parts
            kept, whole = self._decay, norm * norm
            self._noise = kept * self._noise + (1 - kept) * (part - whole) / (count - 1)
            self._signal = kept * self._signal + (1 - kept) * (count * whole - part) / (count - 1)
        return self._noise / self._signal if self._signal > 0 and self._noise > 0 else None
