"""The section about data efficiency: `data_efficiency`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from polyaccel.config.section import CountInt, Int, PositiveInt, Section
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


class DataEfficiencyConfig(Section):
    """Training with fewer samples and tokens."""

    enabled: bool = False
    """Use this section."""
    seed: Int = 1234
    """Seed of what is drawn."""
    data_sampling: DataSamplingConfig = DataSamplingConfig()
    """Which samples come when."""
