"""The section `autotuning`: what `polyaccel tune` tries. Training does not ask it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from polyaccel.config.section import (
    CountInt,
    Listed,
    Nbytes,
    NonNegativeFloat,
    Params,
    PositiveFloat,
    PositiveInt,
    Section,
    Stage,
)
from polyaccel.config.sections.offload import OffloadDevice


class AutotuningConfig(Section):
    """What `polyaccel tune` tries, and how. A training itself does not read it. Samples of an optimizer step stay as
    they are in all that is tried."""

    enabled: bool = False
    """DeepSpeed's switch. Nothing asks it here: who starts a tuner wants to tune."""
    results_dir: str = "autotuning_results"
    """The folder of the results: the best config, the table, the picture, and every trial, from which a tuner that was
    stopped continues."""
    exps_dir: str = "autotuning_exps"
    """The folder of the trials' own folders: output, figures, what they changed in the config."""
    overwrite: bool = True
    """Begin again where the results are those of another config, script or number of ranks; false makes that an
    error."""
    start_profile_step: PositiveInt = 3
    """The first optimizer step of a trial that counts; those before it warm up."""
    end_profile_step: PositiveInt = 5
    """The last step of a trial, which is ended then."""
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    """What the best has most of. As all that is tried has the same samples in a step, the three mean the same: the
    shortest step."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """DeepSpeed's three orders of trials. There is one order here, by estimated times, and all three select it."""
    tuner_early_stopping: CountInt = 5
    """Stop after so many trials in a row that were no better; 0 continues."""
    tuner_num_trials: PositiveInt = 50
    """The most trials. The estimated step time orders them, and what cannot be better is not tried."""
    max_train_micro_batch_size_per_gpu: PositiveInt = 1024
    """The largest micro-batch that is tried."""
    min_train_micro_batch_size_per_gpu: PositiveInt = 1
    """The smallest."""
    arg_mappings: Params = Field(default_factory=dict, validate_default=True)
    """Arguments of the script that repeat a value of the config, by the config's dotted key, for example
    `{"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}`: a trial's values replace them."""

    memory_limit: Nbytes | None = None
    """polyaccel's own: bytes of a device's memory that a rank may use, for example "16G"; null is what the device
    has."""
    trial_timeout: PositiveFloat = 600.0
    """polyaccel's own: seconds after which a trial is ended with all that it has started."""
    margin: NonNegativeFloat = 0.05
    """polyaccel's own: settings whose estimated step is longer than the best measured one by more than this share are
    not tried."""
    stages: Listed[tuple[Stage[Literal[0, 1, 2, 3]], ...]] = (0, 1, 2, 3)
    """polyaccel's own: the ZeRO stages that are tried."""
    offload: Listed[tuple[OffloadDevice, ...]] | None = None
    """polyaccel's own: where optimizer states may be; null is the device, and the host where its memory is another.
    "nvme" is tried where it stands here and `offload_optimizer.nvme_path` is set."""
    checkpointing: Listed[tuple[bool, ...]] = (False, True)
    """polyaccel's own: whether activations may be kept (false), computed again (true), or either."""
    bucket_sizes: Listed[tuple[PositiveInt, ...]] = ()
    """polyaccel's own: other values of `zero_optimization.reduce_bucket_size` to try; the config's is always tried."""
    tensor: Listed[tuple[PositiveInt, ...]] = ()
    """polyaccel's own: numbers of ranks that share the weights of each layer, in addition to the config's."""
    sequence: Listed[tuple[PositiveInt, ...]] = ()
    """polyaccel's own: numbers of ranks that share sequences, in addition to the config's."""

    @model_validator(mode="after")
    def _in_order(self) -> AutotuningConfig:
        if self.start_profile_step > self.end_profile_step:
            first, last = self.start_profile_step, self.end_profile_step
            raise ValueError(f"has start_profile_step = {first} behind end_profile_step = {last}")
        least, most = self.min_train_micro_batch_size_per_gpu, self.max_train_micro_batch_size_per_gpu
        if least > most:
            raise ValueError(f"has min_train_micro_batch_size_per_gpu = {least} above the largest, {most}")
        for name in ("stages", "offload", "checkpointing"):
            if getattr(self, name) == ():
                raise ValueError(f"names nothing in {name}")
        return self
