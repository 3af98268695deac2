"""DeepSpeed's names of batches by tokens, and of learning rates that follow their sizes, over polyaccel's groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler

from polyaccel.data import DataAnalysis, IndexedDataset, group_by_tokens
from polyaccel.data.token_batches import LR_SCALES
from polyaccel.errors import ConfigError, PolyaccelError, Problem

_KEY = "data_efficiency.data_sampling.dynamic_batching"


def batch_by_seqlens(
    seqlens: Any,
    max_tokens: int,
    sequence_ids_per_mb: Any = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Return the groups of samples, each with the number of its batch; the samples and longest sample of each batch."""
    if required_microbatches_of_same_size:
        hint = "leave it out: stages of a pipeline take micro-batches of one size"
        raise PolyaccelError("groups of equally many samples do not exist here", hint=hint, value=True)
    ids = np.arange(len(seqlens)) if sequence_ids_per_mb is None else np.asarray(sequence_ids_per_mb)
    lengths = np.asarray(seqlens)[ids]
    found = group_by_tokens(
        lengths,
        max_tokens=max_tokens,
        per_batch=effective_batch_size,
        least=min_batch_size or 1,
        most=max_batch_size or None,
        order=sequence_picking_order,
        seed=seed,
    )
    groups = [found[at] for at in range(len(found))]
    longest = [int(lengths[group].max()) for group in groups]
    batches = range(0, len(groups), effective_batch_size)
    return (
        [(at // effective_batch_size, ids[group].tolist()) for at, group in enumerate(groups)],
        [int(size) for size in found.batch_sizes()],
        [max(longest[at : at + effective_batch_size]) for at in batches],
    )


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear") -> float:
    """Return the learning rate of a batch of `batch_size`, where `base_lr` is that of `base_batch_size`."""
    name = "none" if method is None else method.lower()
    if name not in LR_SCALES:
        hint = f"use one of {sorted(LR_SCALES)}"
        raise PolyaccelError(f"there is no scaling of learning rates by {method!r}", hint=hint, value=method)
    return base_lr * LR_SCALES[name](batch_size / base_batch_size)


def dataloader_for_variable_batch_size(
    dataset: Any,
    microbatch_ids: Sequence[tuple[int, Sequence[int]]],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """Return a loader of this rank's groups, and the arguments with which `engine.deepspeed_io` makes one."""
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise PolyaccelError("samples are to be padded", hint="give sample_padding_fn", value=None)
    pad = sample_padding_fn if required_microbatches_of_same_seqlen else None
    collate = _Groups(dataset, list(batch_max_seqlens), pad, dataloader_collate_fn)
    ids: Any = list(microbatch_ids)
    sampler: Any = DistributedSampler(ids, dataloader_num_replicas, dataloader_rank, shuffle=False)
    loader = DataLoader(
        ids,
        dataloader_batch_size,
        sampler=sampler,
        num_workers=dataloader_num_workers,
        collate_fn=collate,
        pin_memory=dataloader_pin_memory,
    )
    return loader, {
        "dataset": ids,
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "data_sampler": sampler,
        "collate_fn": collate,
        "num_local_io_workers": dataloader_num_workers,
    }


class _Groups:
    """Makes a batch of groups: of all their samples, padded where `pad` is there."""

    def __init__(self, dataset: Any, longest: list[int], pad: Any, collate: Any) -> None:
        self._dataset, self._longest, self._pad, self._collate = dataset, longest, pad, collate

    def __call__(self, groups: list[tuple[int, list[int]]]) -> Any:
        samples = []
        for batch, ids in groups:
            found = [self._dataset[one] for one in ids]
            samples += found if self._pad is None else [self._pad(one, self._longest[batch]) for one in found]
        return samples if self._collate is None else self._collate(samples)


class VariableBatchSizeLR:
    """A schedule of learning rates whose numbers follow the size of each batch, batch after batch of an epoch.

    `lr_scheduler` is the schedule below, or an optimizer whose rates stay.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        has_schedule = hasattr(lr_scheduler, "optimizer")
        self.base_lr_scheduler = lr_scheduler if has_schedule else None
        self.optimizer = lr_scheduler.optimizer if has_schedule else lr_scheduler
        self.base_batch_size, self.batch_sizes, self.dataloader = base_batch_size, list(batch_sizes), dataloader
        self.lr_scaling_method, self.verbose = lr_scaling_method, verbose
        self.last_epoch = last_epoch + 1
        self.base_lrs = self.get_lr()
        self._scale()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the next step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """Return them without the factor of the batch."""
        return list(self.base_lrs)

    def step(self, epoch: int | None = None) -> None:
        """Move to the next batch, or to batch `epoch`, and let the schedule below take a step."""
        self._set(self.base_lrs)
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.step(*(() if epoch is None else (epoch,)))
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self.base_lrs = self.get_lr()
        self._scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the schedule below."""
        below = None if self.base_lr_scheduler is None else self.base_lr_scheduler.state_dict()
        names = ("base_batch_size", "lr_scaling_method", "batch_sizes", "base_lrs", "last_epoch", "verbose")
        return {"base_lr_scheduler": below, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a state."""
        others = dict(state_dict)
        below = others.pop("base_lr_scheduler")
        if self.base_lr_scheduler is not None and below is not None:
            self.base_lr_scheduler.load_state_dict(below)
        for name, value in others.items():
            setattr(self, name, value)
        self._set(self.base_lrs)
        self._scale()

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _scale(self) -> None:
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        self._set([scale_lr(self.base_batch_size, size, rate, self.lr_scaling_method) for rate in self.get_lr()])


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Return the schedule of a loader of `batch_sizes`, over another schedule or the rates of an optimizer."""
    return VariableBatchSizeLR(
        lr_scheduler_or_optimizer, base_batch_size, batch_sizes, dataloader, lr_scaling_method, verbose=verbose
    )


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Any,
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Any = None,
    lr_scaling_method: str | None = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """Return a loader of groups, the schedule of their learning rates, and arguments of `engine.deepspeed_io`."""
    groups, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        min_batch_size,
        max_batch_size,
        sequence_picking_order,
        effective_batch_size,
        required_microbatches_of_same_size,
        verbose,
        seed,
    )
    loader, arguments = dataloader_for_variable_batch_size(
        dataset,
        groups,
        longest,
        dataloader_rank,
        dataloader_batch_size,
        dataloader_num_replicas,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
        required_microbatches_of_same_seqlen,
        sample_padding_fn,
    )
    schedule = VariableBatchSizeLR(
        lr_scheduler_or_optimizer, effective_batch_size, sizes, loader, lr_scaling_method, verbose=verbose
    )
    return loader, schedule, arguments


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Any = None,
    dataset_filter_ids: Any = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[list[Any]], Any] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """Return them by the config of `engine`. Collective where lengths are neither given nor analysed yet."""
    efficiency = engine.runtime.config.data_efficiency
    section = efficiency.data_sampling.dynamic_batching
    if not section.enabled:
        raise ConfigError([Problem(f"{_KEY}.enabled", False, "is off", "enable it, or use the function of groups")])
    ranks = engine.mesh.group(("data",), engine.communicator.rank)
    if dataset_seqlens is None:
        dataset_seqlens = _analysed(dataset, engine, section.metrics_path, dataloader_collate_fn, batch_seqlens_fn)
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        dataset_seqlens,
        section.max_tokens,
        engine.train_batch_size(),
        dataset_filter_ids,
        section.lr_scaling_method,
        section.min_batch_size,
        section.max_batch_size,
        section.sequence_picking_order,
        engine.train_micro_batch_size_per_gpu(),
        ranks.index(engine.communicator.rank),
        len(ranks),
        efficiency.data_sampling.num_workers,
        dataloader_collate_fn,
        efficiency.data_sampling.pin_memory,
        engine.lr_scheduler or engine.optimizer,
        sample_padding_fn=sample_padding_fn,
        seed=efficiency.seed,
    )


def _analysed(dataset: Any, engine: Any, folder: str | None, collate: Any, lengths_of: Any) -> Any:
    """The lengths in the files of an analysis, which the ranks make together where there is none."""
    if folder is None:
        hint = "give dataset_seqlens, or name the folder of an analysis"
        raise ConfigError([Problem(f"{_KEY}.metrics_path", None, "is missing", hint)])
    prefix = Path(folder) / "seqlen" / "seqlen_sample_to_metric"
    if not engine.communicator.broadcast_object(IndexedDataset.exists(prefix)):
        if lengths_of is None:
            raise ConfigError([Problem(f"{_KEY}.metrics_path", folder, "has no lengths", "give batch_seqlens_fn")])

        def length(sample: Any) -> Any:
            return lengths_of([sample] if collate is None else collate([sample]))

        analysis = DataAnalysis(dataset, folder, metrics={"seqlen": length})
        analysis.map(worker=engine.communicator.rank, workers=engine.communicator.world_size)
        engine.communicator.barrier()
        if engine.communicator.rank == 0:
            analysis.reduce()
        engine.communicator.barrier()
    found = IndexedDataset(prefix)
    if len(found) != len(dataset):
        expected = f"has the lengths of {len(found)} samples, and the dataset has {len(dataset)}"
        raise ConfigError([Problem(f"{_KEY}.metrics_path", folder, expected, "delete the folder")])
    return np.fromiter((int(one[0]) for one in found), np.int64, len(found))
