"""The whole config: DeepSpeed's JSON as a frozen tree, before (`Config`) and after (`ResolvedConfig`) resolution."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, PrivateAttr

from polyaccel.config.checkpoint import ActivationCheckpointingConfig, CheckpointConfig
from polyaccel.config.comm import CommConfig, CommsLoggerConfig
from polyaccel.config.data import DataEfficiencyConfig
from polyaccel.config.jax import JaxConfig
from polyaccel.config.monitors import (
    AutotuningConfig,
    CometConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    TensorboardConfig,
    TimersConfig,
    WandbConfig,
)
from polyaccel.config.offload import AioConfig
from polyaccel.config.optimizer import OptimizerConfig
from polyaccel.config.parallel import (
    CompileConfig,
    ExpertParallelConfig,
    HybridEngineConfig,
    PipelineConfig,
    TensorParallelConfig,
    WeightQuantizationConfig,
)
from polyaccel.config.precision import Bf16Config, DataTypesConfig, FloatName, Fp16Config, TorchAutocastConfig
from polyaccel.config.scheduler import SchedulerConfig
from polyaccel.config.section import NonNegativeFloat, Params, PositiveFloat, PositiveInt, Section
from polyaccel.config.zero import ZeroConfig


class Config(Section):
    """A config as written: typed and free of contradictions, its `"auto"` and its batch sizes still open.

    A key whose value was `"auto"` is listed in `auto_keys` and stands at its default here.
    """

    schema_ref: str | None = Field(None, alias="$schema")
    """For editors: where the JSON Schema is (`polyaccel config schema`). Nothing else reads it."""
    accelerator: str | None = None
    """polyaccel's own: name of an installed plugin of the group `polyaccel.accelerators`; null is detected."""
    comm: CommConfig = CommConfig()
    """polyaccel's own: backend and timeout of the collectives."""
    jax: JaxConfig = JaxConfig()
    """polyaccel's own: how a JAX function runs."""
    matrix_kernels: Literal["auto", "off"] = "auto"
    """polyaccel's own: float32 products of `nn.Linear` on the CPU by oneDNN, "auto" where a short measurement on this
    machine (kept in the user's cache) finds it at least 1.2 times as fast as torch's own, on every rank. It rounds
    differently. The environment variable POLYACCEL_MATRIX_KERNELS (auto, on, off) goes before this key."""

    train_batch_size: PositiveInt | None = None
    """Samples of one optimizer step over all ranks: micro-batch x accumulation steps x ranks."""
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    """Samples of one forward pass on one rank."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches of one optimizer step."""
    managed_gradient_accumulation: bool = True
    """The engine counts micro-batches; false makes every `step` an optimizer step."""

    optimizer: OptimizerConfig | None = None
    """The optimizer to build when the caller passes none."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build when the caller passes none."""
    gradient_clipping: NonNegativeFloat = 0.0
    """Largest L2 norm of the gradients; 0 is off, which is the default here (DeepSpeed's is 1.0)."""
    prescale_gradients: bool = False
    """Divide gradients by the number of ranks before they are summed instead of after."""
    gradient_predivide_factor: PositiveFloat = 1.0
    """Divide gradients by this before they are summed and by the rest after. Excludes `prescale_gradients`."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """How the ranks' gradients are combined."""
    communication_data_type: FloatName | None = None
    """Element type in which gradients travel; null is their own."""
    seq_parallel_communication_data_type: FloatName = "fp32"
    """The same under sequence parallelism."""
    zero_optimization: ZeroConfig = ZeroConfig()
    """What is sharded over the ranks."""
    zero_allow_untested_optimizer: bool = False
    """Accept an optimizer that is not known to be elementwise, under sharded states."""
    zero_force_ds_cpu_optimizer: bool = True
    """Under offload, refuse an optimizer that is not DeepSpeed's own for the host. Every optimizer that `initialize`
    takes runs on the host here, so both values are met."""

    fp16: Fp16Config = Fp16Config()
    """Half precision with a loss scale."""
    bf16: Bf16Config = Bf16Config()
    """Brain float without one."""
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    """Float32 parameters, autocast in forward."""
    data_types: DataTypesConfig = DataTypesConfig()
    """Element types beside those."""

    steps_per_print: PositiveInt | None = None
    """Optimizer steps between two progress lines; null prints none."""
    wall_clock_breakdown: bool = False
    """Print the time of each phase with the progress lines."""
    memory_breakdown: bool = False
    """Print memory use in each phase."""
    dump_state: bool = False
    """Print the engine's settings at the start."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """Level of polyaccel's loggers; null leaves them as they are."""
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """Recording of collectives."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """Operation counts of one step."""
    timers: TimersConfig = TimersConfig()
    """Timers."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """Metrics to TensorBoard."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """Metrics to CSV files."""
    wandb: WandbConfig = WandbConfig()
    """Metrics to Weights & Biases."""
    comet: CometConfig = CometConfig()
    """Metrics to Comet."""

    dataloader_drop_last: bool = False
    """Drop the samples at the end of an epoch that do not fill a batch."""
    data_efficiency: DataEfficiencyConfig = DataEfficiencyConfig()
    """Curricula, dynamic batches, dropped tokens."""
    vocabulary_size: PositiveInt | None = None
    """Logs a warning when it is no multiple of 8, the width for which matrix units are built."""
    disable_python_gc: bool = False
    """Switch Python's garbage collector off while training, for the whole process."""
    disable_allgather: bool = False
    """Dead in DeepSpeed; true is an error."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saved states."""
    datastates_ckpt: Params | None = None
    """DeepSpeed's third-party asynchronous writer; its presence asks for it."""
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Activations that are recomputed instead of kept."""
    aio: AioConfig = AioConfig()
    """File access of the nvme tier."""

    sequence_parallel_size: PositiveInt = 1
    """Ranks that share a sequence."""
    data_parallel_size: PositiveInt | None = None
    """States the number of data-parallel ranks; another number of ranks is an error."""
    use_data_before_expert_parallelism: bool = False
    """Order of ranks under expert parallelism."""
    pipeline: PipelineConfig = PipelineConfig()
    """Pipeline parallelism."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """Tensor parallelism."""
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    """Experts over ranks."""
    compile: CompileConfig = CompileConfig()
    """Communication inserted by the compiler."""
    hybrid_engine: HybridEngineConfig = HybridEngineConfig()
    """Training and generation with the same weights."""
    weight_quantization: WeightQuantizationConfig = WeightQuantizationConfig()
    """Weights as small integers for inference."""
    autotuning: AutotuningConfig = AutotuningConfig()
    """Search for the fastest config."""

    _auto: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def auto_keys(self) -> frozenset[str]:
        """Dotted keys that were `"auto"`."""
        return self._auto


class ResolvedConfig(Config):
    """A config to run with: nothing is `"auto"`, the batch sizes are whole numbers that agree with the world size.

    `optimizer.params` and `scheduler.params` of a named type hold every argument, defaults included, and
    `optimizer.type` is spelt as in `OPTIMIZER_PARAMS`.
    """

    train_batch_size: PositiveInt
    """Samples of one optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: PositiveInt
    """Samples of one forward pass on one rank."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches of one optimizer step."""

    def to_json(self) -> str:
        """The complete config, defaults included. Loading and resolving it for the same world size gives it back."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2) + "\n"
