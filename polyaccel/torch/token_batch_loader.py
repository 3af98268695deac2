"""Loader of micro-batches of about equally many tokens, and the learning rate of each step by its samples.

[Note: Positions in token batches]
The groups of an epoch are one list, a function of lengths, settings and epoch only. Micro-batch k of all ranks is the
list's next `micro_batch_size * world_size` groups, dealt out in turn as torch's DistributedSampler does. So a position
is one integer, counted in groups of all ranks, and means the same for any number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from polyaccel.data.token_batches import LR_SCALES, ORDERS, TokenBatches, group_by_tokens
from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError, Problem
from polyaccel.torch.engine_loader import EngineLoader

KEY = "data_efficiency.data_sampling.dynamic_batching"
_LOG = getLogger(__name__)
_PRIME = 1_000_003


class TokenBatchLoader(EngineLoader):
    """Micro-batches of this rank, each of groups with at most `max_tokens` tokens. See [Note: Positions in token
    batches].

    One iteration is one epoch. Each `iter` begins a new epoch, even if the last one was not finished; only the first
    one after `load_state_dict` continues there. The order "random" is drawn again in each epoch.

    Args:
        dataset: Map-style dataset.
        lengths: Tokens of each sample, equal on all ranks.
        max_tokens: Most tokens of a group.
        micro_batch_size: Groups of a micro-batch on this rank.
        accumulation: Micro-batches of an optimizer step.
        rank: This rank among those that share the dataset.
        world_size: Number of these ranks.
        least: Fewest samples of a group.
        most: Most samples of a group; None does not limit them.
        order: "dataloader" for the dataset's own, "random", or "seqlen" for rising lengths.
        scaling: What learning rates follow: "linear" or "sqrt" in the samples of a step, or "none".
        seed: Seed of all draws, equal on all ranks.
        collate_fn: Makes a batch from a list of samples, and pads them; None is torch's default.
        num_workers: Processes that load samples; 0 loads in this one.
        pin_memory: Copy batches to page-locked host memory.

    Raises:
        ConfigError: The dataset has no samples by number, or another number of them than `lengths`.
        PolyaccelError: The samples make no batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        lengths: ArrayLike,
        max_tokens: int,
        micro_batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        least: int = 1,
        most: int | None = None,
        order: str = "dataloader",
        scaling: str = "linear",
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._lengths = np.asarray(lengths)
        _require(dataset, self._lengths, order, scaling)
        self.dataset, self.micro_batch_size, self.rank, self.world_size = dataset, micro_batch_size, rank, world_size
        self.seed, self.scaling = seed, scaling
        self._micro = micro_batch_size * world_size
        self._rules: dict[str, Any] = {
            "max_tokens": max_tokens,
            "per_batch": self._micro * accumulation,
            "least": least,
            "most": most,
            "order": order,
        }
        self.epoch = self.position = 0
        self._taken = 0
        """Groups of all ranks that were handed out since the last update."""
        self._batch_size = 0
        """Samples of the batch of the last micro-batch that was handed out."""
        self._resuming = False
        self._grouped: tuple[int, TokenBatches] | None = None
        self._worker_seeds = torch.Generator()
        self._arguments: dict[str, Any] = {
            "collate_fn": _Padless(collate_fn),
            "num_workers": num_workers,
            "pin_memory": pin_memory,
        }
        left_out = len(self.groups.left_out)
        if left_out and rank == 0:
            _LOG.warning("%d of %d samples are in no batch of the first epoch: they are longer than %d tokens, or "
                         "make no whole batch", left_out, len(self._lengths), max_tokens)  # fmt: skip

    @property
    def groups(self) -> TokenBatches:
        """The groups of the epoch under way, or of the next one."""
        draw = self.epoch if self._rules["order"] == "random" else 0
        if self._grouped is None or self._grouped[0] != draw:
            self._grouped = draw, group_by_tokens(self._lengths, seed=self.seed + draw, **self._rules)
        return self._grouped[1]

    def __len__(self) -> int:
        """Return the micro-batches of the epoch under way, or of the next one, on each rank."""
        return len(self.groups) // self._micro

    def batch_sizes(self) -> Sequence[int]:
        """Return the samples of each optimizer step of the epoch, on all ranks together."""
        sizes: list[int] = self.groups.batch_sizes().tolist()
        return sizes

    def __iter__(self) -> Iterator[Any]:
        if self.position and not self._resuming:
            self.epoch, self.position, self._taken = self.epoch + 1, 0, 0
        self._resuming = False
        groups, sizes, begin = self.groups, self.batch_sizes(), self.position
        per_batch, end = self._rules["per_batch"], len(groups)
        parts = (self.seed * _PRIME + self.epoch) * _PRIME + begin
        self._worker_seeds.manual_seed((parts * _PRIME + self.rank) % 2**63)
        sampler = [
            np.concatenate([groups[at] for at in range(first + self.rank, first + self._micro, self.world_size)])
            for first in range(begin, end, self._micro)
        ]
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=[one.tolist() for one in sampler],
            generator=self._worker_seeds,
            **self._arguments,
        )
        for first, micro_batch in zip(range(begin, end, self._micro), loader, strict=True):
            self._batch_size = sizes[first // per_batch]
            self._taken += self._micro
            self.position = first + self._micro
            if self.position == end:  # with its last micro-batch, not when the caller asks for one more
                self.epoch, self.position = self.epoch + 1, 0
            yield micro_batch

    def lr_scale(self) -> float:
        """Return the factor on learning rates of the update that the handed-out micro-batches end, and begin the next.

        It is 1 where none was handed out since the last update.

        Returns:
            Samples of the batch over its number of groups, by `scaling`.

        Raises:
            PolyaccelError: Something else was handed out than one whole batch.
        """
        taken, self._taken = self._taken, 0
        per_batch = self._rules["per_batch"]
        if not taken or self.scaling == "none":
            return 1.0
        if taken != per_batch or self.position % per_batch:
            raise PolyaccelError(
                f"a batch of {per_batch} groups sets the learning rate, and {taken} were taken from the loader since "
                "the last update",
                hint='take each micro-batch when it is needed, or set "lr_scaling_method": "none"',
                value=taken,
            )
        return LR_SCALES[self.scaling](self._batch_size / per_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next micro-batch; it is equal on all ranks."""
        return {"epoch": self.epoch, "position": self.position, "batches": self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a saved position.

        Args:
            state_dict: Result of `state_dict`, from any number of ranks that make a batch of as many groups.

        Raises:
            CheckpointError: It is of another kind of loader, other lengths or settings.
        """
        if state_dict.get("batches") != self._identity():
            raise CheckpointError(
                f"the saved position in the training data does not fit: {state_dict.get('batches')!r} is saved, "
                f"these batches are {self._identity()!r}",
                hint=f"resume with the same data, seed, train_batch_size and {KEY}, or do not load the loader's state",
                value=state_dict.get("batches"),
            )
        position = state_dict["position"]
        if position % self._micro:
            raise CheckpointError(
                f"the saved position, {position} groups, is inside a micro-batch of {self._micro} on these ranks",
                hint="save where an optimizer step ends",
                value=position,
            )
        self.epoch, self.position = state_dict["epoch"], position
        self._taken = position % int(self._rules["per_batch"])
        self._resuming = True

    def _identity(self) -> dict[str, Any]:
        """What decides the groups, apart from the epoch."""
        digest = zlib.crc32(self._lengths.astype("<i8").tobytes())
        return {"samples": len(self._lengths), "lengths": digest, "seed": self.seed, **self._rules}


class ScaledUpdates:
    """Calls around the updates of `engine`, whose learning rates follow its loader of token batches.

    Rates are put back after each update, so that schedules never see a factor.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._before: list[tuple[MutableMapping[str, Any], Any]] = []

    def before_update(self) -> None:
        """Scale the learning rate of each optimizer group."""
        loader = self._engine.training_dataloader
        factor = self._engine.lr_scale = loader.lr_scale() if isinstance(loader, TokenBatchLoader) else 1.0
        for group in self._engine.optimizer.param_groups:
            if group.get("lr") is not None:
                self._before.append((group, group["lr"]))
                group["lr"] = group["lr"] * factor

    def after_update(self, applied: bool) -> None:
        """Put the rates back."""
        for group, rate in self._before:
            group["lr"] = rate
        self._before.clear()


class _Padless:
    """torch's default for batches, with a hint where samples differ in length; else the caller's function."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        if self._collate_fn is not None:
            return self._collate_fn(samples)
        try:
            return default_collate(samples)
        except RuntimeError as error:
            hint = "pass collate_fn to initialize, which pads them"
            raise PolyaccelError(f"samples of a batch do not fit together: {error}", hint=hint, value=None) from error


def _require(dataset: Any, lengths: Any, order: str, scaling: str) -> None:
    problems = []
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        hint = "give a dataset with __getitem__ and __len__"
        problems.append(Problem(f"{KEY}.enabled", True, "training_data has no samples by number", hint))
    elif len(dataset) != len(lengths):
        expected = f"has the lengths of {len(lengths)} samples, and training_data has {len(dataset)}"
        problems.append(Problem(f"{KEY}.metrics_path", len(lengths), expected, "analyse this dataset again"))
    if order not in ORDERS:
        problems.append(Problem(f"{KEY}.sequence_picking_order", order, f"expected one of {ORDERS}"))
    if scaling not in LR_SCALES:
        problems.append(Problem(f"{KEY}.lr_scaling_method", scaling, f"expected one of {sorted(LR_SCALES)}"))
    if problems:
        raise ConfigError(problems, source="training_data")
