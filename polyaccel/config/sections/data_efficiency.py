"""The section about data efficiency: `data_efficiency`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from polyaccel.config.section import CountInt, Int, Listed, PositiveInt, Section
from polyaccel.config.sections.curriculum import CurriculumScheduleConfig


class CurriculumMetricConfig(Section):
    """A measure of difficulty, and how much of it each step admits."""

    index_to_sample_path: str | None = None
    """Token file of sample numbers by rising values, without `.bin`; not needed for "single_cluster"."""
    index_to_metric_path: str | None = None
    """Token file of these values, needed for `difficulty_type` "value"."""
    difficulty_type: Literal["value", "percentile"] = "value"
    """What difficulties are: values of the metric, or parts of all samples out of `max_difficulty`."""
    clustering_type: Literal["schedule_based", "single_cluster"] = "schedule_based"
    """Sample by this metric, or only count its difficulty, by which the script changes batches."""
    min_difficulty: CountInt
    """The largest difficulty at the beginning."""
    max_difficulty: PositiveInt
    """The largest difficulty at the end."""
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = "fixed_linear"
    """Shape of the growth; "custom" is a function that the script sets."""
    schedule_config: CurriculumScheduleConfig = CurriculumScheduleConfig()
    """Numbers of the growth."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.schedule_config.require(self.schedule_type)
        if self.min_difficulty > self.max_difficulty:
            raise ValueError("min_difficulty is more than max_difficulty")
        if self.clustering_type != "single_cluster":
            if self.index_to_sample_path is None:
                raise ValueError("index_to_sample_path is missing, where samples are chosen by this metric")
            if self.difficulty_type == "value" and self.index_to_metric_path is None:
                raise ValueError('index_to_metric_path is missing, which difficulty_type "value" needs')
        return self


class SampledCurriculumConfig(Section):
    """Samples by difficulty. Torch only."""

    enabled: bool = False
    """Sample by difficulty."""
    data_cluster_path: str | None = None
    """Without effect: clusters follow from metrics and seed, and are kept in memory."""
    curriculum_metrics: dict[str, CurriculumMetricConfig] = Field(default_factory=dict)
    """Measures of difficulty, by names of your own. A sample is taken when all of them admit it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and not self.curriculum_metrics:
            raise ValueError("curriculum_metrics is missing")
        return self


class DynamicBatchingConfig(Section):
    """Batches by their number of tokens. Torch only.

    `train_batch_size` counts groups of samples then, each of at most `max_tokens` tokens.
    """

    enabled: bool = False
    """Put samples into such groups."""
    max_tokens: PositiveInt | None = None
    """Most tokens of a group. Longer samples are left out."""
    metrics_path: str | None = None
    """Folder of `DataAnalysis` with a metric `seqlen`; not needed for token files, which have lengths."""
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """What the learning rate of a step follows, in its number of samples over that of its groups."""
    min_batch_size: PositiveInt = 1
    """Fewest samples of a group."""
    max_batch_size: PositiveInt | None = None
    """Most samples of a group."""
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """Order of the samples: the dataset's, drawn in each epoch, or by rising length."""
    verbose: bool = False
    """Without effect: the samples of each step are counted by `training_dataloader.batch_sizes()`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and self.max_tokens is None:
            raise ValueError("max_tokens is missing")
        if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
            raise ValueError("min_batch_size is more than max_batch_size")
        return self


class DataSamplingConfig(Section):
    """The loader of `training_data`. Torch only."""

    enabled: bool = False
    """Use this section."""
    num_epochs: PositiveInt = 1000
    """Samples of one iteration of a curriculum's loader, as a multiple of the dataset's."""
    num_workers: CountInt = 0
    """Processes that load samples."""
    pin_memory: bool = False
    """Copy batches to page-locked host memory."""
    curriculum_learning: SampledCurriculumConfig = SampledCurriculumConfig()
    """Samples by difficulty."""
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Batches by their number of tokens."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.curriculum_learning.enabled and self.dynamic_batching.enabled:
            raise ValueError("curriculum_learning and dynamic_batching both choose the samples of a batch")
        return self


class RandomLtdScheduleNumbers(Section):
    """Numbers of the growth."""

    require_steps: PositiveInt
    """Optimizer steps until layers see `max_value` tokens."""
    seq_per_step: PositiveInt = 1
    """Numbers of tokens are multiples of this."""


class RandomLtdScheduleConfig(Section):
    """How many tokens of a sequence the chosen layers see."""

    min_value: PositiveInt
    """Tokens at the beginning."""
    max_value: PositiveInt
    """Tokens at the end: the length of sequences, for the rest of training to see all."""
    schedule_type: Literal["fixed_linear"] = "fixed_linear"
    """Shape of the growth."""
    schedule_config: RandomLtdScheduleNumbers
    """Numbers of the growth."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.schedule_config.seq_per_step <= self.min_value <= self.max_value:
            raise ValueError("expected schedule_config.seq_per_step <= min_value <= max_value")
        return self


class RandomLtdConfig(Section):
    """Layers that see a random part of the tokens. Torch only."""

    enabled: bool = False
    """Let layers see a part."""
    total_layer_num: PositiveInt | None = None
    """Layers of the model: the length of the `ModuleList` that holds them."""
    random_ltd_layer_num: CountInt | None = None
    """How many layers `random_ltd_layer_id` names."""
    random_ltd_layer_id: Listed[tuple[CountInt, ...]] = ()
    """Indices of the layers that see a part. The paper leaves out the first and the last one."""
    model_mask_name: str | None = None
    """Argument of a layer that is the attention mask; null where it has none."""
    model_type: Literal["decoder", "encoder"] = "decoder"
    """Without effect: masks are cut to the tokens that are left, in both."""
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"
    """Order of a layer's first dimensions."""
    micro_batch_size: PositiveInt | None = None
    """Without effect: the batch is what comes."""
    global_batch_size: PositiveInt | None = None
    """Without effect."""
    random_ltd_schedule: RandomLtdScheduleConfig | None = None
    """How many tokens they see."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.enabled:
            return self
        chosen = self.random_ltd_layer_id
        if self.total_layer_num is None or self.random_ltd_schedule is None or not chosen:
            raise ValueError("total_layer_num, random_ltd_layer_id and random_ltd_schedule are needed")
        if len(set(chosen)) != len(chosen) or max(chosen) >= self.total_layer_num:
            raise ValueError("random_ltd_layer_id names layers that do not exist, or one twice")
        if self.random_ltd_layer_num not in (None, len(chosen)):
            raise ValueError(f"random_ltd_layer_num is not {len(chosen)}, as random_ltd_layer_id says")
        return self


class DataRoutingConfig(Section):
    """Which tokens reach which layers."""

    enabled: bool = False
    """Use this section."""
    random_ltd: RandomLtdConfig = RandomLtdConfig()
    """Layers that see a random part of the tokens."""


class DataEfficiencyConfig(Section):
    """Training with fewer samples and tokens."""

    enabled: bool = False
    """Use this section."""
    seed: Int = 1234
    """Seed of what is drawn."""
    data_sampling: DataSamplingConfig = DataSamplingConfig()
    """Which samples come when."""
    data_routing: DataRoutingConfig = DataRoutingConfig()
    """Which tokens reach which layers."""
