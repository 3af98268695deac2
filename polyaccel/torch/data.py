"""Training data: the DataLoader of `initialize(training_data=...)`, and the conversion of batches.

The loader shuffles again in each epoch, and resumes at its position after a restart, at another world size too. Batches
move to the device, change their type, and give the loss of a module.

[Note: Loader positions]
Every epoch has one global order of samples, a function of seed and epoch only. Micro-batch k of all ranks together is
the next `micro_batch_size * world_size` samples of it, dealt out in turn: sample i of them goes to rank
i % world_size, as torch's DistributedSampler does. So how far an epoch has come is one integer, counted in samples of
all ranks, that means the same for any number of ranks and any micro-batch size. A micro-batch counts when it is handed
out, not when a worker has prepared it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import cycle, islice
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from polyaccel.accelerators.base import Accelerator
from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError, Problem
from polyaccel.torch.engine_loader import EngineLoader, PositionedLoader, announce_epoch

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")


def is_stateful(loader: Any) -> bool:
    """Whether `loader` is an iterable with a state."""
    return all(callable(getattr(loader, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))


def is_own_loader(data: Any) -> bool:
    """Whether `data` is a loader of the script's own that has a state, such as torchdata's StatefulDataLoader."""
    is_data = isinstance(data, IterableDataset) or hasattr(data, "__getitem__")
    return is_stateful(data) and not is_data and not isinstance(data, EngineLoader)


def require_dataset(data: Any) -> None:
    """Raise ConfigError for a loader without a state in the place of a dataset."""
    if isinstance(data, EngineLoader) or (isinstance(data, DataLoader) and not is_own_loader(data)):
        hint = "pass its dataset (and collate_fn), or leave training_data out and give batches of the loader yourself"
        problem = Problem("training_data", type(data).__name__, "is a loader, and a dataset is expected", hint)
        raise ConfigError([problem], source="initialize")


class PositionedSampler(DistributedSampler[Any]):
    """torch's DistributedSampler, that can begin in the middle: at `position` samples (of all ranks) into the epoch.

    Without `drop_last` the last samples are filled up from the beginning of the epoch's order, so that all ranks get
    equally many; with it, what does not fill a micro-batch on every rank is left out.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        if not isinstance(dataset, Sized):
            hint = "give it a __len__, or make it a torch IterableDataset"
            problem = Problem("training_data", type(dataset).__name__, "has no length", hint)
            raise ConfigError([problem], source="initialize")
        super().__init__(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.total_samples = len(dataset)
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = micro_batch_size * world_size
        self.position = 0

    def micro_batches_from(self, position: int) -> int:
        """How many micro-batches each rank gets of the rest of an epoch after `position` samples."""
        left = max(0, self.total_samples - position)
        return left // self.global_batch_size if self.drop_last else -(-left // self.global_batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        rest = order[self.position :]
        if self.drop_last:
            del rest[len(rest) // self.global_batch_size * self.global_batch_size :]
        else:
            rest += islice(cycle(order), -len(rest) % self.num_replicas)
        return iter(rest[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        left = max(0, self.total_samples - self.position)
        if self.drop_last:
            return left // self.global_batch_size * self.micro_batch_size
        return -(-left // self.num_replicas)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.total_samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices: list[int] = torch.randperm(self.total_samples, generator=generator).tolist()
        return indices


class ShardedDataLoader(PositionedLoader, Generic[_T]):
    """Loader of this rank's micro-batches of a dataset, which resumes at any number of ranks. See
    [Note: Loader positions].

    One iteration is one epoch, and `RepeatingLoader` repeats them. Each `iter` begins a new epoch with a new order,
    even if the last one was not finished; only the first one after `load_state_dict` continues there. One iteration at
    a time.

    An IterableDataset shards itself over the ranks, and gives equally many micro-batches on each. Its `set_epoch` is
    called if it has one. It resumes by reading and dropping the samples that were seen. At another number of ranks that
    is exact only where sample i belongs to rank i % ranks: `polyaccel.data.WholeStream` is at any number.

    Workers have different random seeds in every epoch, on every rank and in every worker, and the process's own
    generators stay as they are. A resumed epoch seeds its workers again: only the *order* of samples continues exactly.

    Args:
        dataset: torch Dataset with a length, or IterableDataset.
        micro_batch_size: Samples of a micro-batch on this rank.
        rank: This rank among the ranks that share the dataset, from 0.
        world_size: Number of ranks that share the dataset.
        shuffle: Draw a new order of samples from `seed` and the epoch.
        seed: Seed of the order and of the workers, equal on all ranks.
        drop_last: Leave out what does not fill a micro-batch on every rank. False fills up from the beginning of the
            epoch's order.
        collate_fn: Makes a batch from a list of samples; None is torch's default.
        num_workers: Processes that load samples; 0 loads in this one.
        pin_memory: Copy batches to page-locked host memory.
        reshuffles: False keeps one order for every epoch, until `sampler.set_epoch` is called.

    Raises:
        ConfigError: A size is out of range, `dataset` is not a dataset, or it does not fill a single micro-batch.

    Example:
        ```python
        ranks = {"rank": comm.get_rank(), "world_size": comm.get_world_size()}
        loader = ShardedDataLoader(dataset, micro_batch_size=8, **ranks)
        for epoch in range(epochs):
            for batch in loader:
                ...
        ```
    """

    sampler_class: ClassVar[type[PositionedSampler]] = PositionedSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], _T] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        reshuffles: bool = True,
    ) -> None:
        require_dataset(dataset)
        sizes = {"train_micro_batch_size_per_gpu": micro_batch_size, "world_size": world_size}
        problems = [Problem(key, value, "expected at least 1") for key, value in sizes.items() if value < 1]
        if not 0 <= rank < max(1, world_size):
            problems.append(Problem("rank", rank, f"expected 0 to {world_size - 1}"))
        if problems:
            raise ConfigError(problems, source="training_data")
        super().__init__(micro_batch_size=micro_batch_size, rank=rank, world_size=world_size, seed=seed)
        self.dataset = dataset
        self.reshuffles = reshuffles
        self.sampler: PositionedSampler | None = None
        _refuse_no_dataset(dataset)
        if not isinstance(dataset, IterableDataset):
            self.sampler = self._make_sampler(drop_last=drop_last, shuffle=shuffle)
            self._refuse_empty(self.sampler)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=micro_batch_size,
            sampler=self.sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=self._worker_seeds,
        )

    def _make_sampler(self, *, drop_last: bool, shuffle: bool) -> PositionedSampler:
        return self.sampler_class(
            self.dataset,
            micro_batch_size=self.micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
        )

    def __len__(self) -> int:
        """Return the micro-batches of a whole epoch on each rank. Raises TypeError for a dataset without a length."""
        return self.sampler.micro_batches_from(0) if self.sampler else len(self._loader)

    def __iter__(self) -> Iterator[_T]:
        self._begin()
        return self._sampled(self.sampler) if self.sampler else self._stream_epoch(self._rest_of_stream)

    def _sampled(self, sampler: PositionedSampler) -> Iterator[_T]:
        if not sampler.micro_batches_from(self.position):  # less is left than one micro-batch of the present size
            self._end_epoch()
        micro_batches = sampler.micro_batches_from(self.position)
        sampler.position = self.position
        if self.reshuffles:
            sampler.set_epoch(self.epoch)
        self._seed_workers()
        for number, micro_batch in enumerate(self._loader, start=1):
            # The epoch ends with its last micro-batch, not when the caller asks for one more: a state saved in between
            # would otherwise resume into an empty epoch.
            if number == micro_batches:
                self._end_epoch()
            else:
                self.position += self.global_batch_size
            yield micro_batch

    def _rest_of_stream(self) -> Iterator[_T]:
        seen, rest = divmod(self.position, self.global_batch_size)
        if rest:
            _LOG.warning("an IterableDataset resumes at whole micro-batches: %d samples come again", rest)
        if seen:
            _LOG.info("reading past %d micro-batches of an IterableDataset to resume", seen)
        self.position = seen * self.global_batch_size
        announce_epoch(self.dataset, self.epoch)
        self._seed_workers()
        return islice(self._loader, seen, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next micro-batch, in samples of all ranks; it is equal on all ranks."""
        ranks = {} if self.sampler else {"ranks": self.world_size}
        return {"epoch": self.epoch, "position": self.position, **ranks, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a saved position.

        Args:
            state_dict: Result of `state_dict`, from any number of ranks and any micro-batch size.

        Raises:
            CheckpointError: The position does not fit: another dataset length, seed or shuffling.
        """
        wrong = {key: state_dict.get(key) for key, value in self._identity().items() if state_dict.get(key) != value}
        wrong |= {key: value for key in ("epoch", "position") if not _is_count(value := state_dict.get(key))}
        if wrong:
            raise CheckpointError(
                f"the saved position in the training data does not fit: {wrong!r} is saved, "
                f"this loader has { {key: value for key, value in self._identity().items() if key in wrong}!r}",
                hint="resume with the same training data and seed, or do not load the loader's state",
                value=wrong,
            )
        if (ranks := state_dict.get("ranks", self.world_size)) != self.world_size and self.rank == 0:
            _LOG.warning(
                "an IterableDataset that %d ranks shared resumes on %d: samples are missing or come again unless "
                "sample i belongs to rank i %% ranks; polyaccel.data.WholeStream resumes exactly",
                ranks, self.world_size,
            )  # fmt: skip
        self.epoch = state_dict["epoch"]
        self.position = state_dict["position"]
        self._resuming = True

    def _identity(self) -> dict[str, Any]:
        """The values that decide the order of samples, apart from the epoch."""
        if self.sampler is None:
            return {"samples": None, "seed": None, "shuffle": None}
        return {"samples": self.sampler.total_samples, "seed": self.seed, "shuffle": self.sampler.shuffle}

    def _refuse_empty(self, sampler: PositionedSampler) -> None:
        if not sampler.micro_batches_from(0):
            need = self.global_batch_size if sampler.drop_last else 1
            expected = f"{sampler.total_samples} samples do not make one micro-batch: expected at least {need}"
            hint = "give more data, lower the micro-batch size, or turn dataloader_drop_last off"
            raise ConfigError([Problem("training_data", sampler.total_samples, expected, hint)], source="initialize")


class RepeatingLoader(Iterator[_T]):
    """Iterator over the epochs of a loader, one after another. DeepSpeed's name.

    Args:
        loader: Iterable that each epoch iterates over. If it gives nothing at all, `next` raises ConfigError.
    """

    def __init__(self, loader: Iterable[_T]) -> None:
        self.loader = loader
        self._epoch: Iterator[_T] | None = None

    def __iter__(self) -> RepeatingLoader[_T]:
        return self

    def __next__(self) -> _T:
        for _ in range(2):  # what is left of this epoch, else the next one
            if self._epoch is None:
                self._epoch = iter(self.loader)
            try:
                return next(self._epoch)
            except StopIteration:
                self._epoch = None
        problem = Problem("training_data", self.loader, "gives no micro-batch", "give it some data")
        raise ConfigError([problem], source="RepeatingLoader")


def mean_to_host(losses: Sequence[Tensor], accelerator: Accelerator) -> Callable[[], float | None]:
    """Queue a copy of the mean of `losses` to the host. The result waits for that copy and nothing queued later."""
    if not losses:
        return lambda: None
    mean = torch.stack([loss.float() for loss in losses]).mean().to("cpu", non_blocking=True)
    is_queued = accelerator.capabilities().streams
    copied = accelerator.current_stream().record() if is_queued else None

    def read() -> float:
        if copied is not None and not copied.is_reached():
            copied.synchronize()
        return float(mean)

    return read


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch`, any nesting of containers, with its tensors on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """`values`, any nesting of containers, with its floating tensors as `dtype`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def call_with(engine: Callable[..., Any], batch: Any) -> Any:
    """The output of `engine` for one micro-batch: a mapping has named inputs, a sequence several."""
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch)


def loss_of(outputs: Any) -> Tensor:
    """Return the loss: the tensor, `outputs.loss`, `outputs["loss"]`, or the first of a tuple."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        found = outputs[0] if outputs else None
    elif not isinstance(outputs, Tensor):
        found = getattr(outputs, "loss", None)
    if not isinstance(found, Tensor):
        kind = type(outputs).__name__
        hint = "let the module return its loss: alone, first in a tuple, or as `loss`"
        raise PolyaccelError(f"the module returned a {kind} without a loss", hint=hint, value=kind)
    return found


def _refuse_no_dataset(dataset: object) -> None:
    """Raise ConfigError unless `dataset` gives samples by number, or is an IterableDataset."""
    if isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__"):
        return
    hint = "give a dataset with __getitem__ and __len__, or a torch IterableDataset"
    if isinstance(dataset, DataLoader):
        hint = "give its dataset; or leave training_data out, and pass the batches of the loader to the engine"
    problem = Problem("training_data", type(dataset).__name__, "is not a dataset", hint)
    raise ConfigError([problem], source="training_data")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
