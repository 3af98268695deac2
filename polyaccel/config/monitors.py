"""Sections about watching a run: metric writers, profiler, timers."""

from __future__ import annotations

from typing import Literal

from polyaccel.config.section import CountInt, Int, NonNegativeFloat, PositiveInt, Section


class TensorboardConfig(Section):
    """Metrics to TensorBoard."""

    enabled: bool = False
    """Write them."""
    output_path: str = ""
    """Directory; empty is the working directory."""
    job_name: str = "DeepSpeedJobName"
    """Directory of this run below it."""


class CsvMonitorConfig(Section):
    """Metrics to CSV files."""

    enabled: bool = False
    """Write them."""
    output_path: str = ""
    """Directory; empty is the working directory."""
    job_name: str = "DeepSpeedJobName"
    """Directory of this run below it."""


class WandbConfig(Section):
    """Metrics to Weights & Biases."""

    enabled: bool = False
    """Write them."""
    group: str | None = None
    """Group of runs."""
    team: str | None = None
    """Team that owns the project."""
    project: str = "deepspeed"
    """Project."""


class CometConfig(Section):
    """Metrics to Comet."""

    enabled: bool = False
    """Write them."""
    samples_log_interval: PositiveInt = 100
    """Samples between two records."""
    project: str | None = None
    """Project."""
    workspace: str | None = None
    """Workspace."""
    api_key: str | None = None
    """API key; better left to COMET_API_KEY."""
    experiment_name: str | None = None
    """Name of the experiment."""
    experiment_key: str | None = None
    """Key of an existing experiment."""
    online: bool | None = None
    """Send records at once; null is Comet's own choice."""
    mode: Literal["get_or_create", "get", "create"] | None = None
    """Whether the experiment may or must exist; null is Comet's own choice."""


class FlopsProfilerConfig(Section):
    """Operation counts of one step."""

    enabled: bool = False
    """Profile."""
    recompute_fwd_factor: NonNegativeFloat = 0.0
    """The share of the forward pass that activation checkpointing repeats."""
    profile_step: PositiveInt = 1
    """The step to profile."""
    module_depth: Int = -1
    """Depth of the report; -1 is the innermost modules."""
    top_modules: PositiveInt = 1
    """Modules to list for each depth."""
    detailed: bool = True
    """Print the profile of every module."""
    output_file: str | None = None
    """File for the report; null is the terminal."""


class ThroughputConfig(Section):
    """Samples per second."""

    enabled: bool = True
    """Throughput is always part of the metrics and costs two clock readings a step; false is an error."""
    synchronized: bool = False
    """Wait for the device at every micro-batch (DeepSpeed's default, which slows training); true is an error."""


class TimersConfig(Section):
    """Timers."""

    throughput: ThroughputConfig = ThroughputConfig()
    """Samples per second."""


class AutotuningModelInfo(Section):
    """What the tuner may be told of the model."""

    profile: bool = False
    """Find the figures by a profiling run."""
    num_params: CountInt | None = None
    """Parameters."""
    hidden_size: CountInt | None = None
    """Hidden size."""
    num_layers: CountInt | None = None
    """Layers."""


class AutotuningConfig(Section):
    """Search for the fastest config."""

    enabled: bool = False
    """Search."""
    fast: bool = True
    """Tune micro-batch sizes only."""
    results_dir: str = "autotuning_results"
    """Directory for the results."""
    exps_dir: str = "autotuning_exps"
    """Directory for the trials' configs."""
    overwrite: bool = True
    """Overwrite earlier trials."""
    start_profile_step: PositiveInt = 3
    """First step that counts."""
    end_profile_step: PositiveInt = 5
    """Last step that counts."""
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    """What is optimised."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """How the space is searched."""
    tuner_early_stopping: CountInt = 5
    """Trials without progress after which the search ends."""
    tuner_num_trials: PositiveInt = 50
    """The most trials."""
    arg_mappings: dict[str, str] | None = None
    """From config keys to the script's own arguments."""
    model_info: AutotuningModelInfo | None = None
    """What is known of the model."""
    mp_size: PositiveInt = 1
    """Degree of model parallelism."""
    max_train_batch_size: PositiveInt | None = None
    """The largest global batch to try."""
    min_train_batch_size: PositiveInt = 1
    """The smallest global batch to try."""
    max_train_micro_batch_size_per_gpu: PositiveInt = 1024
    """The largest micro-batch to try."""
    min_train_micro_batch_size_per_gpu: PositiveInt = 1
    """The smallest micro-batch to try."""
    num_tuning_micro_batch_sizes: PositiveInt = 3
    """Micro-batch sizes to try."""
