"""`DeepSpeedDataLoader`: the micro-batches of a rank in DeepSpeed's order and numbers.

[Note: DeepSpeed's sample order]
DeepSpeed deals samples by torch's DistributedSampler with seed 0 and never sets its epoch: every epoch has the same
order, unless the script calls `loader.data_sampler.set_epoch`. The sampler fills its order up to equally many samples a
rank, and `dataloader_drop_last` drops what is then less than a micro-batch. The pipeline engine does not shuffle.

[Note: DeepSpeed's random draws]
DeepSpeed's loader is torch's: each `iter` draws one number on the process's generator, the seed of its workers. A
model that draws (dropout, noise) sees that, so `DealtLoader` draws there too, while polyaccel's loader draws nothing.
`RepeatingLoader` calls `iter` when it is made, and the pipeline engine makes one in `initialize`, on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import getLogger
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, RandomSampler

from polyaccel.accelerators.detect import get_accelerator
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch import data as core
from polyaccel.torch.data import PositionedSampler, ShardedDataLoader
from polyaccel.torch.engine_loader import EngineLoader

log = getLogger("polyaccel.deepspeed")


class DealtSampler(PositionedSampler):
    """torch's DistributedSampler with its own padding; `drops` says that a last micro-batch that is not full is left
    out. See [Note: DeepSpeed's sample order]."""

    drops = False

    def micro_batches_from(self, position: int) -> int:
        of_rank = -(-max(0, self.total_samples - position) // self.num_replicas)
        return of_rank // self.micro_batch_size if self.drops else -(-of_rank // self.micro_batch_size)


class DealtLoader(ShardedDataLoader[Any]):
    """A `ShardedDataLoader` in DeepSpeed's order, which draws as DeepSpeed's. See both notes above."""

    def __iter__(self) -> Iterator[Any]:
        self._worker_seeds.set_state(torch.get_rng_state())  # torch's loader draws its workers' seed there
        torch.empty((), dtype=torch.int64).random_()  # the same number, on the process's generator
        return super().__iter__()

    def _seed_workers(self) -> None:
        """Leave the seeds as they are: `__iter__` sets them."""

    sampler_class = DealtSampler

    def _make_sampler(self, *, drop_last: bool, shuffle: bool) -> PositionedSampler:
        sampler = super()._make_sampler(drop_last=False, shuffle=shuffle)
        assert isinstance(sampler, DealtSampler)
        sampler.drops = drop_last
        return sampler

    def _refuse_empty(self, sampler: PositionedSampler) -> None:
        if not sampler.micro_batches_from(0):
            log.warning("%d samples make no micro-batch of %d: none come", sampler.total_samples, self.micro_batch_size)


class RepeatingLoader(core.RepeatingLoader[Any]):
    """polyaccel's, which begins its first epoch when it is made. See [Note: DeepSpeed's random draws]."""

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__(loader)
        self._epoch = iter(loader)


class DeepSpeedDataLoader(EngineLoader):
    """The micro-batches of this rank, by DeepSpeed's arguments; `engine.deepspeed_io` makes one.

    `data_sampler` chooses the samples where there is one. `num_local_io_workers` is 0 if left out: this process reads
    the samples. `tput_timer` has no effect.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] = {},
    ) -> None:
        if deepspeed_dataloader_config.get("curriculum_learning"):
            hint = 'give a data_sampler of torch\'s, and leave "curriculum_learning" out'
            problem = Problem("curriculum_learning", True, "belongs to the data efficiency library", hint)
            raise ConfigError([problem], source="DeepSpeedDataLoader")
        self.dataset, self.batch_size = dataset, batch_size
        self.collate_fn, self.tput_timer = collate_fn, tput_timer
        self.num_local_io_workers = num_local_io_workers or 0
        self.dataloader_drop_last = dataloader_drop_last
        self.pin_memory = pin_memory and get_accelerator().name != "cpu"  # torch warns where there is no device
        self.data: Iterator[Any] | None = None
        if data_sampler is None and local_rank < 0:
            data_sampler = RandomSampler(dataset)
        self.dataloader: DataLoader[Any] | ShardedDataLoader[Any]
        if data_sampler is not None:
            self.data_sampler = data_sampler
            self.dataloader = DataLoader(
                dataset,
                batch_size,
                sampler=data_sampler,
                collate_fn=collate_fn,
                num_workers=self.num_local_io_workers,
                pin_memory=self.pin_memory,
                drop_last=dataloader_drop_last,
            )
            return
        self.dataloader = DealtLoader(
            dataset,
            micro_batch_size=batch_size,
            rank=dist.get_rank() if data_parallel_rank is None else data_parallel_rank,
            world_size=data_parallel_world_size or dist.get_world_size(),
            drop_last=dataloader_drop_last,
            collate_fn=collate_fn,
            num_workers=self.num_local_io_workers,
            pin_memory=self.pin_memory,
            reshuffles=False,
        )
        self.data_sampler = self.dataloader.sampler

    def __iter__(self) -> Iterator[Any]:
        self.data = iter(self.dataloader)
        return self.data

    def __next__(self) -> Any:
        if self.data is None:
            self.data = iter(self.dataloader)
        return next(self.data)

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        return len(self.dataloader)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch; nothing where a `data_sampler` was given."""
        return self.dataloader.state_dict() if isinstance(self.dataloader, ShardedDataLoader) else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration continue where `state_dict` was made. Raises CheckpointError as
        `ShardedDataLoader`."""
        if isinstance(self.dataloader, ShardedDataLoader):
            self.dataloader.load_state_dict(state_dict)
