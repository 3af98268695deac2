"""Loader of samples by difficulty, whose state continues at any number of ranks.

[Note: Position in a curriculum]
Samples are one stream, batch after batch of `CurriculumOrder`. Micro-batch k of all ranks is the stream's next
`micro_batch_size * world_size` samples, of which each rank takes its own part. A state is the order before the batch
under way, the size of that batch, and how much of it was handed out. So another world size continues with the next
sample of the stream. What workers have prepared ahead does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from polyaccel.data.curriculum import CurriculumOrder, Metric
from polyaccel.errors import CheckpointError, ConfigError, Problem
from polyaccel.torch.engine_loader import EngineLoader

_KEY = "data_efficiency.data_sampling.curriculum_learning"


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that the sampler has begun: `before` is the order's state, `begin` its first sample in the stream."""

    before: dict[str, Any]
    begin: int
    size: int
    difficulties: dict[str, float]


class CurriculumDataLoader(EngineLoader):
    """Micro-batches of this rank by difficulty. See [Note: Position in a curriculum].

    An iteration has `epochs` times as many samples as the dataset. A second one continues after them, and one after a
    `break` where it was left.

    Args:
        dataset: Map-style dataset.
        metrics: Measures of difficulty, by name.
        micro_batch_size: Samples of a micro-batch on this rank.
        accumulation: Micro-batches of an optimizer step.
        rank: This rank among those that share the dataset.
        world_size: Number of these ranks.
        seed: Seed of all draws, equal on all ranks.
        epochs: Length of an iteration, in sizes of the dataset.
        custom: Metrics whose difficulty `set_schedules` has to set.
        collate_fn: Makes a batch from a list of samples; None is torch's default.
        num_workers: Processes that load samples; 0 loads in this one.
        pin_memory: Copy batches to page-locked host memory.

    Raises:
        ConfigError: The dataset has no length, or is smaller than a micro-batch of all ranks.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        metrics: Mapping[str, Metric],
        micro_batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        epochs: int = 1,
        custom: tuple[str, ...] = (),
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            hint = "give a dataset with __getitem__ and __len__"
            raise ConfigError([Problem(f"{_KEY}.enabled", True, "training_data has no samples by number", hint)])
        samples = len(dataset)
        self._micro = micro_batch_size * world_size
        if samples * epochs < self._micro:
            expected = f"{samples} samples do not make a micro-batch of {self._micro} on all ranks"
            raise ConfigError([Problem("training_data", samples, expected, "give more data or lower the micro-batch")])
        self.dataset, self.micro_batch_size, self.rank, self.world_size = dataset, micro_batch_size, rank, world_size
        self.accumulation, self.seed = accumulation, seed
        self._custom, self._scheduled = set(custom), set[str]()
        self._total = samples * epochs
        self._order = CurriculumOrder(metrics, samples, seed)
        self._consumed = 0
        self._under_way: _Batch | None = None
        self._offset = 0
        self._post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        self._worker_seeds = torch.Generator()
        self._arguments: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
        }

    def __len__(self) -> int:
        """Return the micro-batches of an iteration on each rank."""
        return self._total // self._micro

    def set_schedules(self, schedules: Mapping[str, Callable[[int], float]]) -> None:
        """Set functions of the step, counted from 1, that give a metric's largest difficulty.

        Args:
            schedules: Functions by metric, the same on all ranks. They never fall.

        Raises:
            ConfigError: There is no such metric, or its `schedule_type` is not "custom".
        """
        if wrong := sorted(set(schedules) - self._custom):
            hint = f'set "schedule_type": "custom" there; these have it: {sorted(self._custom)}'
            raise ConfigError([Problem(f"{_KEY}.curriculum_metrics.{wrong[0]}", wrong, "has a schedule", hint)])
        for name, difficulty in schedules.items():
            metric = self._order.metrics[name]
            self._order.metrics[name] = Metric(
                difficulty=difficulty,
                samples=metric.samples,
                values=metric.values,
                percentile=metric.percentile,
                most=metric.most,
            )
            self._scheduled.add(name)

    def set_post_process(self, function: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        """Set what changes each micro-batch by the difficulties under way.

        Args:
            function: Gets a micro-batch and `{"current_difficulties": {metric: difficulty}}`, and returns the
                micro-batch. None removes it.
        """
        self._post_process = function

    def __iter__(self) -> Iterator[Any]:
        self._require_schedules()
        end = (self._consumed // self._total + 1) * self._total
        if end - self._consumed < self._micro:  # smaller micro-batches came so far
            self._consumed, end = end, end + self._total
        count = (end - self._consumed) // self._micro
        order = self._order if self._under_way is None else self._order.restored(self._under_way.before)
        begun: deque[_Batch] = deque()
        self._worker_seeds.manual_seed((self.seed * 1_000_003 + self._consumed) % 2**63 + self.rank)
        sampler = self._micro_batches(order, count, begun)
        loader: DataLoader[Any] = DataLoader(
            self.dataset, batch_sampler=sampler, generator=self._worker_seeds, **self._arguments
        )
        place = self._consumed
        for micro_batch in loader:
            while len(begun) > 1 and begun[1].begin <= place:
                begun.popleft()
            difficulties = begun[0].difficulties
            place += self._micro
            while len(begun) > 1 and begun[1].begin <= place:
                begun.popleft()
            self._consumed, self._under_way, self._offset = place, begun[0], place - begun[0].begin
            if place > end - self._micro:
                self._consumed = end  # less than a micro-batch is left of this iteration
            if self._post_process is not None:
                micro_batch = self._post_process(micro_batch, {"current_difficulties": dict(difficulties)})
            yield micro_batch

    def _micro_batches(self, order: CurriculumOrder, count: int, begun: deque[_Batch]) -> Iterator[list[int]]:
        """This rank's sample numbers of the next micro-batches; each batch that is begun is appended to `begun`."""
        stream: list[int] = []
        at = self._consumed
        size, skipped = self._micro * self.accumulation, 0
        if self._under_way is not None:
            size, skipped, at = self._under_way.size, self._offset, self._consumed - self._offset
        for _ in range(count):
            while len(stream) < self._micro:
                before = order.state_dict()
                batch = order.next_batch(size).tolist()
                begun.append(_Batch(before, at, size, order.difficulties))
                at += size
                stream += batch[skipped:]
                size, skipped = self._micro * self.accumulation, 0
            own = stream[self.rank * self.micro_batch_size : (self.rank + 1) * self.micro_batch_size]
            del stream[: self._micro]
            yield own

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next micro-batch; it is equal on all ranks."""
        under_way = self._under_way
        return {
            "consumed": self._consumed,
            "order": self._order.state_dict() if under_way is None else under_way.before,
            "size": None if under_way is None else under_way.size,
            "offset": self._offset,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a saved position.

        Args:
            state_dict: Result of `state_dict`, from any number of ranks and any micro-batch size.

        Raises:
            CheckpointError: It is of another kind of loader, other data, metrics or seed.
        """
        if not {"consumed", "order", "size", "offset"} <= set(state_dict):
            raise CheckpointError(
                f"the saved position in the training data is not one of a curriculum: {sorted(state_dict)}",
                hint=f"resume with the same {_KEY}, or do not load the loader's state",
                value=sorted(state_dict),
            )
        order = self._order.restored(state_dict["order"])
        self._order, self._consumed, self._offset = order, state_dict["consumed"], state_dict["offset"]
        size = state_dict["size"]
        begin = self._consumed - self._offset
        self._under_way = None if size is None else _Batch(dict(state_dict["order"]), begin, size, {})

    def _require_schedules(self) -> None:
        if missing := sorted(self._custom - self._scheduled):
            hint = "call engine.training_dataloader.set_schedules before the first batch"
            raise ConfigError([Problem(f"{_KEY}.curriculum_metrics.{missing[0]}", "custom", "has no function", hint)])
