"""What `data_efficiency.data_sampling` asks of the loader: its workers, a curriculum by metrics, token batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyaccel.config import Config
from polyaccel.config.sections.data_efficiency import CurriculumMetricConfig, DynamicBatchingConfig
from polyaccel.data.curriculum import Metric
from polyaccel.data.indexed_dataset import IndexedDataset
from polyaccel.engine.policies.step_inputs import Growth, Stairs
from polyaccel.errors import ConfigError, PolyaccelError, Problem

_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
_BATCHES = "data_efficiency.data_sampling.dynamic_batching"
_SEQLEN = "seqlen"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatchPolicy:
    """Groups of samples of at most `max_tokens` tokens, as `polyaccel.data.token_batches` makes them."""

    max_tokens: int
    least: int = 1
    most: int | None = None
    order: str = "dataloader"
    scaling: str = "linear"
    metrics_path: str | None = None

    def lengths(self, dataset: Any) -> NDArray[np.int64]:
        """Return the tokens of each sample of `dataset`. Raises ConfigError where nothing has them."""
        if self.metrics_path is not None:
            return self._analysed(f"{Path(self.metrics_path) / _SEQLEN / _SEQLEN}_sample_to_metric")
        if isinstance(dataset, IndexedDataset):
            return np.asarray(dataset.sizes, np.int64)
        hint = 'analyse the data by polyaccel.data.DataAnalysis(data, folder, metrics={"seqlen": len}), and name folder'
        expected = "is missing, and training_data is not a token file, which has lengths"
        raise ConfigError([Problem(f"{_BATCHES}.metrics_path", None, expected, hint)])

    @staticmethod
    def _analysed(prefix: str) -> NDArray[np.int64]:
        key = f"{_BATCHES}.metrics_path"
        try:
            found = IndexedDataset(prefix)
            return np.fromiter((int(one[0]) for one in found), np.int64, len(found))
        except PolyaccelError as error:
            hint = 'analyse the data first, by polyaccel.data.DataAnalysis with metrics={"seqlen": len}'
            raise ConfigError([Problem(key, prefix, f"cannot be read: {error.message}", hint)]) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """How `training_data` is loaded. Without `metrics` in a shuffled order, else by difficulty, with `seed`."""

    num_workers: int = 0
    pin_memory: bool = False
    epochs: int = 1
    seed: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    custom: tuple[str, ...] = ()
    """Metrics whose difficulty is a function that the script sets."""
    token_batches: TokenBatchPolicy | None = None
    """How samples are put into groups; None where batches have as many samples."""


def sampling_policy_of(config: Config) -> SamplingPolicy | None:
    """The loader that the config asks for; None where it asks for none."""
    efficiency = config.data_efficiency
    section = efficiency.data_sampling
    if not (efficiency.enabled and section.enabled):
        return None
    curriculum = section.curriculum_learning
    metrics = curriculum.curriculum_metrics if curriculum.enabled else {}
    return SamplingPolicy(
        num_workers=section.num_workers,
        pin_memory=section.pin_memory,
        epochs=section.num_epochs,
        seed=efficiency.seed,
        metrics={name: _metric_of(name, one) for name, one in metrics.items()},
        custom=tuple(name for name, one in metrics.items() if one.schedule_type == "custom"),
        token_batches=_token_batches_of(section.dynamic_batching),
    )


def _token_batches_of(section: DynamicBatchingConfig) -> TokenBatchPolicy | None:
    if not section.enabled:
        return None
    assert section.max_tokens is not None  # the section checks it
    return TokenBatchPolicy(
        max_tokens=section.max_tokens,
        least=section.min_batch_size,
        most=section.max_batch_size,
        order=section.sequence_picking_order,
        scaling=section.lr_scaling_method,
        metrics_path=section.metrics_path,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDropPolicy:
    """Layers `layers` of `total` see `tokens` of a step's tokens, which is a function of the steps that are done."""

    layers: tuple[int, ...]
    total: int
    tokens: Callable[[int], int]
    mask_name: str | None
    sequence_dim: int
    seed: int


def token_drop_policy_of(config: Config) -> TokenDropPolicy | None:
    """The token dropping that the config asks for; None where it asks for none."""
    efficiency = config.data_efficiency
    section = efficiency.data_routing.random_ltd
    if not (efficiency.enabled and efficiency.data_routing.enabled and section.enabled):
        return None
    schedule, total = section.random_ltd_schedule, section.total_layer_num
    assert schedule is not None  # the section checks both
    assert total is not None
    numbers, most = schedule.schedule_config, schedule.max_value
    steps = numbers.require_steps
    growth = Growth(least=schedule.min_value, most=most, steps=steps, multiple=numbers.seq_per_step)
    return TokenDropPolicy(
        layers=section.random_ltd_layer_id,
        total=total,
        tokens=lambda done: most if done >= steps else growth.at(done),
        mask_name=section.model_mask_name,
        sequence_dim=1 if section.hidden_state_order == "batch_seq_dim" else 0,
        seed=efficiency.seed,
    )


def _metric_of(name: str, section: CurriculumMetricConfig) -> Metric:
    chooses = section.clustering_type != "single_cluster"
    by_value = section.difficulty_type == "value"
    return Metric(
        difficulty=_difficulty_of(section),
        samples=_opened(name, "index_to_sample_path", section.index_to_sample_path) if chooses else None,
        values=_opened(name, "index_to_metric_path", section.index_to_metric_path) if chooses and by_value else None,
        percentile=not by_value,
        most=section.max_difficulty,
    )


def _difficulty_of(section: CurriculumMetricConfig) -> Callable[[int], float]:
    """The largest difficulty of each step, which never falls below the first multiple from `min_difficulty` on."""
    numbers, most = section.schedule_config, section.max_difficulty
    if section.schedule_type == "fixed_discrete":
        return Stairs(values=numbers.difficulty, last_steps=numbers.max_step).at
    if section.schedule_type == "custom":
        return lambda step: section.min_difficulty
    steps, multiple = numbers.total_curriculum_step or 1, numbers.difficulty_step
    root = (numbers.root_degree or 1) if section.schedule_type == "fixed_root" else 1
    growth = Growth(least=section.min_difficulty, most=most, steps=steps, root=root, multiple=multiple)
    least = min(most, -(-section.min_difficulty // multiple) * multiple)
    return lambda step: most if step >= steps else max(least, growth.at(step))


def _opened(name: str, key: str, path: str | None) -> IndexedDataset:
    assert path is not None  # the section checks it
    try:
        return IndexedDataset(path)
    except PolyaccelError as error:
        key = f"{_CURRICULUM}.curriculum_metrics.{name}.{key}"
        hint = "analyse the dataset first, by polyaccel.data.DataAnalysis"
        raise ConfigError([Problem(key, path, f"cannot be read: {error.message}", hint)]) from error
