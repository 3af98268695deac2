"""The whole config: DeepSpeed's JSON as a frozen tree, before (`Config`) and after (`ResolvedConfig`) resolution, and
its JSON Schema, by which editors complete and check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr

from polyaccel.config.auto import AUTO, RULES
from polyaccel.config.keys import walk_keys
from polyaccel.config.section import Listed, NonNegativeFloat, PluginTable, PositiveFloat, PositiveInt, Section
from polyaccel.config.sections.activation_checkpointing import ActivationCheckpointingConfig
from polyaccel.config.sections.autotuning import AutotuningConfig
from polyaccel.config.sections.checkpoint import CheckpointConfig
from polyaccel.config.sections.comm import CommConfig, CommsLoggerConfig
from polyaccel.config.sections.compression import CompressionConfig, EigenvalueConfig
from polyaccel.config.sections.curriculum import CurriculumLearningConfig, ProgressiveLayerDropConfig
from polyaccel.config.sections.data_efficiency import DataEfficiencyConfig
from polyaccel.config.sections.diloco import DiLoCoConfig
from polyaccel.config.sections.elasticity import ElasticityConfig
from polyaccel.config.sections.generation import GenerationConfig
from polyaccel.config.sections.hybrid_engine import HybridEngineConfig
from polyaccel.config.sections.low_precision import LowPrecisionLinearConfig
from polyaccel.config.sections.mesh import (
    ExpertParallelConfig,
    MeshConfig,
    SequenceParallelConfig,
    TensorParallelConfig,
)
from polyaccel.config.sections.monitors import (
    CometConfig,
    CsvMonitorConfig,
    MonitorSection,
    TensorBoardConfig,
    WandbConfig,
)
from polyaccel.config.sections.optimizer import EmaConfig, NoiseScaleConfig, OptimizerConfig
from polyaccel.config.sections.pipeline import PipelineConfig
from polyaccel.config.sections.precision import Bf16Config, DataTypesConfig, FloatName, Fp16Config, TorchAutocastConfig
from polyaccel.config.sections.scheduler import SchedulerConfig
from polyaccel.config.sections.tiled_compute import TiledComputeConfig
from polyaccel.config.sections.timers import AlertsConfig, FlopsProfilerConfig, TimersConfig, TraceConfig
from polyaccel.config.sections.zero import ZeroConfig
from polyaccel.redaction import redact_tree


class JaxConfig(Section):
    """polyaccel's own section: how a JAX function runs. Modules of torch do not ask it."""

    execution: Literal["views", "native"] = "views"
    """The side that exchanges and updates: "views", the engine on its own memory, which JAX sees; "native", JAX, in
    one program over all its devices, several a process too. A mesh of the script's own needs "native"."""
    aux: Literal["last", "mean"] = "last"
    """What `engine.aux` is after a step: "last", the auxiliary output of this rank's last micro-batch; "mean", the mean
    over the step's micro-batches and all ranks (other numbers than floats become float32)."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache, so that the next start does not compile them again. A folder that the
    script or JAX_COMPILATION_CACHE_DIR sets is used as it is."""


class Config(Section):
    """A config as written: typed and free of contradictions, its `"auto"` and its batch sizes still open.

    A key whose value was `"auto"` is listed in `auto_keys` and stands at its default here.
    """

    schema_ref: str | None = Field(None, alias="$schema")
    """For editors: where the JSON Schema is (`polyaccel config schema`). Nothing else reads it."""
    accelerator: str | None = None
    """polyaccel's own: the device that trains, by the name of an installed plugin of the group
    `polyaccel.accelerators`. Null takes the best one that is present. The environment variable DS_ACCELERATOR goes
    before this key."""
    comm: CommConfig = CommConfig()
    """polyaccel's own: backend and timeout of the collectives."""
    jax: JaxConfig = JaxConfig()
    """polyaccel's own: how a JAX function runs."""
    matrix_kernels: Literal["auto", "off"] = "auto"
    """polyaccel's own: float32 products of `nn.Linear` on the CPU by oneDNN, "auto" where a short measurement on this
    machine (kept in the user's cache) finds it at least 1.2 times as fast as torch's own, on every rank. It rounds
    differently. The environment variable POLYACCEL_MATRIX_KERNELS (auto, on, off) goes before this key."""

    graphs: Literal["off", "update"] = "off"
    """polyaccel's own: the work that the device plays from a recording (a CUDA graph) without a launch for each kernel.
    "update" records the optimizer's update, with the same bits; a device or an optimizer that cannot is refused."""

    verify: Literal["auto", "always", "off"] = "auto"
    """polyaccel's own: compare the first step with plain torch, on copies of the model and small parts of its batches.
    "auto" does so once a model and config where a rewrite cuts the model or runs parts of it again, and keeps the
    result in the user's cache; "always" does so in every run; "off" never. A difference is an error before the first
    update. The environment variable POLYACCEL_VERIFY (auto, always, off) goes before this key."""

    train_batch_size: PositiveInt | None = None
    """Samples of one optimizer step over all ranks: micro-batch x accumulation steps x ranks. Two of the three batch
    sizes determine the third; one alone means a single micro-batch a step."""
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    """Samples of one forward pass on one rank. Activations, and so most of a device's memory, grow with it."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches of one optimizer step. More of them cost time and a second set of gradients, not activations."""
    elasticity: ElasticityConfig = ElasticityConfig()
    """Batch sizes that follow from the number of ranks, the same samples a step on all numbers that it allows."""

    optimizer: OptimizerConfig | None = None
    """The optimizer to build when the caller passes none."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build when the caller passes none."""
    ema: EmaConfig | None = None
    """polyaccel's own: an exponential moving average of weights; null is none."""
    diloco: DiLoCoConfig | None = None
    """polyaccel's own: replica groups that train apart and exchange weights every few steps; null is none."""
    gradient_noise_scale: NoiseScaleConfig | None = None
    """polyaccel's own: measure the gradient noise scale (McCandlish et al. 2018), the batch size from which on larger
    ones gain less than half; null does not. `engine.metrics.gradient_noise_scale` has it, in samples."""
    gradient_clipping: NonNegativeFloat = 0.0
    """Gradients whose L2 norm over the whole model is larger are scaled down to this norm. 0 is off, which is the
    default here (DeepSpeed's is 1.0). No update can begin before the last gradient is there."""
    prescale_gradients: bool = False
    """Divide gradients by the number of ranks before they are summed instead of after: less overflow in 16 bits, more
    underflow."""
    gradient_predivide_factor: PositiveFloat = 1.0
    """Divide gradients by this before they are summed and by the rest after. Excludes `prescale_gradients`."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """How the ranks' gradients are combined: "mean" divides their sum by the number of ranks, "sum" does not."""
    communication_data_type: FloatName | None = None
    """Element type in which gradients travel between ranks; null is their own. 16 bits halve the traffic of float32
    and round every gradient."""
    sparse_gradients: bool = False
    """Exchange gradients of all embedding layers as the rows that a batch used, instead of whole. Those of layers with
    `sparse=True` always travel so. The numbers are the same, and a step sends less. Excludes JAX."""
    zero_optimization: ZeroConfig = ZeroConfig()
    """The states that are sharded over the ranks, and those that leave the device."""
    zero_allow_untested_optimizer: bool = False
    """Accept the caller's optimizer that is not known, under sharded states. It is tried on small tensors: each rank
    runs it on slices, or on some whole parameters if it looks at these."""
    zero_force_ds_cpu_optimizer: bool = True
    """Under offload, refuse an optimizer that is not DeepSpeed's own for the host. Every optimizer that `initialize`
    takes runs on the host here, so both values have the same effect."""

    fp16: Fp16Config = Fp16Config()
    """Half precision with a loss scale."""
    bf16: Bf16Config = Bf16Config()
    """Brain float without one."""
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    """Float32 parameters, autocast in forward."""
    data_types: DataTypesConfig = DataTypesConfig()
    """Further element types."""

    steps_per_print: PositiveInt | None = None
    """Optimizer steps between two progress lines of rank 0: loss, learning rate, gradient norm, loss scale, samples a
    second. Null prints none (but see `wall_clock_breakdown` and `memory_breakdown`)."""
    wall_clock_breakdown: bool = False
    """Print with each progress line how many milliseconds of the step the host spent in each phase, and the device
    where it has streams; each adds up to 100 %. `steps_per_print` is then 10 instead of null. It costs a clock reading
    and an event a phase."""
    memory_breakdown: bool = False
    """Print with each progress line what device and host have in use, and what the plan of the step has of it by
    purpose. `steps_per_print` is then 10 instead of null."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """Where a model's operations and time are."""
    trace: TraceConfig | None = None
    """polyaccel's own: what every rank did in a few steps; null is none."""
    timers: TimersConfig = TimersConfig()
    """What is timed in addition to phases."""
    alerts: AlertsConfig = AlertsConfig()
    """polyaccel's own: what is looked for while a run continues."""
    autotuning: AutotuningConfig = AutotuningConfig()
    """What `polyaccel tune` tries."""
    dump_state: bool = False
    """Print the complete config with all defaults, once, when the engine is made (rank 0)."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """The least important lines of polyaccel's log that rank 0 shows; null is "info". Other ranks show warnings and
    errors only. In a script that configures `logging` itself this sets the logger's level and nothing else. The
    environment variable POLYACCEL_LOG goes before this key."""
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """Recording of collectives."""

    monitors: PluginTable = Field(default_factory=dict, validate_default=True)
    """polyaccel's own: where the figures of each optimizer step go, as `{name: {option: value, ...}}` by the names of
    installed plugins of the group `polyaccel.monitors`. "jsonl" appends a line a step to `metrics.jsonl` in
    `run_dir`. Rank 0 writes. One that fails is dropped with a warning."""
    run_dir: str | None = None
    """polyaccel's own: the folder of the run, which is made. It gets the run's `run.json`, `metrics.jsonl` with the
    figures of each step, and what `monitors` write. Null: no folder, and `monitors` write to the working directory."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """The figures in TensorBoard."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """The figures in CSV files."""
    wandb: WandbConfig = WandbConfig()
    """The figures in Weights & Biases."""
    comet: CometConfig = CometConfig()
    """The figures in Comet."""

    dataloader_drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a batch; false makes a smaller last batch."""
    vocabulary_size: PositiveInt | None = None
    """Logs a warning when it is not a multiple of 8, the width for which matrix units are built."""
    disable_python_gc: bool = False
    """Switch Python's garbage collector off, for the whole process and for good: no pauses, and reference cycles are
    never freed."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saved states."""
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Activations that are recomputed instead of kept."""

    rampup_batch_size: Listed[tuple[PositiveInt, PositiveInt, PositiveInt]] | None = None
    """Megatron-LM's: samples of the first step, how many more at each rise, and the samples over which a step grows to
    `train_batch_size`. Torch only."""
    compression_training: CompressionConfig = CompressionConfig()
    """Quantisation and pruning while training."""
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
    """Curvature of blocks, which decides when weights lose bits."""
    curriculum_learning: CurriculumLearningConfig = CurriculumLearningConfig()
    """Sequences that grow while training."""
    data_efficiency: DataEfficiencyConfig = DataEfficiencyConfig()
    """Samples by difficulty."""
    progressive_layer_drop: ProgressiveLayerDropConfig = ProgressiveLayerDropConfig()
    """Layers that are skipped more often while training continues."""
    low_precision_linear: LowPrecisionLinearConfig = LowPrecisionLinearConfig()
    """polyaccel's own: products of linear layers in 8 or 4 bits."""
    hybrid_engine: HybridEngineConfig = HybridEngineConfig()
    """Generation from the engine that trains."""
    generation: GenerationConfig = GenerationConfig()
    """Numbers of generated tokens."""
    pipeline: PipelineConfig = PipelineConfig()
    """Layers over stages."""
    mesh: MeshConfig = MeshConfig()
    """The axes along which ranks stand."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """Ranks that share the weights of each layer."""
    sequence_parallel_size: PositiveInt = 1
    """DeepSpeed's spelling of `mesh.sequence`."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """How attention is computed over them."""
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    """The experts of a mixture over ranks."""
    use_data_before_expert_parallelism: bool = False
    """Let neighbours have the same experts, and ranks that share experts stand further apart."""
    tiled_compute: TiledComputeConfig = TiledComputeConfig()
    """polyaccel's own: losses and feed-forward layers in tiles of tokens."""
    data_parallel_size: PositiveInt | None = None
    """DeepSpeed's spelling of `mesh.data`."""

    _auto: frozenset[str] = PrivateAttr(default=frozenset())
    _without_effect: dict[str, str] = PrivateAttr(default_factory=dict)
    _mesh_keys: dict[str, str] = PrivateAttr(default_factory=dict)
    _is_checked: bool = PrivateAttr(default=False)
    """Whether it was loaded, and so has no contradictions and no other spelling of a key."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, in which the values of `update` are not checked yet."""
        copied = super().model_copy(update=update, deep=deep)
        copied._is_checked = self._is_checked and not update
        return copied

    def mesh_key(self, axis: str) -> str:
        """Return the key under which the size of `axis` was written, for messages."""
        return self._mesh_keys.get(axis, f"mesh.{axis}")

    @property
    def auto_keys(self) -> frozenset[str]:
        """Dotted keys that were `"auto"`."""
        return self._auto

    @property
    def monitor_sections(self) -> dict[str, MonitorSection]:
        """The sections of monitors that are enabled, by their keys."""
        sections: dict[str, MonitorSection] = {
            "tensorboard": self.tensorboard,
            "csv_monitor": self.csv_monitor,
            "wandb": self.wandb,
            "comet": self.comet,
        }
        return {key: section for key, section in sections.items() if section.enabled}

    @property
    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each written value that has no effect, or that another place decides."""
        return tuple(self._without_effect.values())


class ResolvedConfig(Config):
    """A config to run with: nothing is `"auto"`, the batch sizes are whole numbers that agree with the world size.

    `optimizer.params` and `scheduler.params` of a named type hold every argument, defaults included, and
    `optimizer.type` is spelt as in `OPTIMIZER_PARAMS`.
    """

    train_batch_size: PositiveInt
    """Samples of one optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: PositiveInt
    """Samples of one forward pass on one rank. Activations, and so most of a device's memory, grow with it."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches of one optimizer step."""

    def to_json(self, *, secrets: bool = True) -> str:
        """Return the complete config as JSON text, defaults included.

        Args:
            secrets: False hides keys, tokens and passwords. With True, loading and resolving the text for the same
                world size gives an equal config.

        Returns:
            Indented JSON with a newline at the end.
        """
        tree = self.model_dump(mode="json", by_alias=True)
        return json.dumps(tree if secrets else redact_tree(tree), indent=2) + "\n"

    def public_tree(self) -> dict[str, Any]:
        """Return the config as JSON without plugins' options, which may hold keys."""
        tree: dict[str, Any] = redact_tree(self.model_dump(mode="json", by_alias=True))
        tree["checkpoint"]["storage"], _ = self.checkpoint.storage_plugin
        tree["monitors"] = sorted(self.monitors)
        return tree


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `Config`, with every docstring, and `"auto"` where it is allowed."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for key in walk_keys(Config):
        if key.dotted in RULES:
            owner = schema if key.model is Config else schema["$defs"][key.model.__name__]
            name = key.field.alias or key.name
            _allow_auto(owner["properties"], name)
    return schema


def _allow_auto(properties: dict[str, Any], name: str) -> None:
    written = properties[name]
    outer = {word: written.pop(word) for word in ("description", "default", "title") if word in written}
    options = written["anyOf"] if set(written) == {"anyOf"} else [written]
    properties[name] = {**outer, "anyOf": [*options, {"const": AUTO}]}
