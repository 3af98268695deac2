"""The names of DeepSpeed 0.19.8, module by module, and what stands for each here: the one table that modules, tests and
`docs/compatibility.md` are made of.
"""

from __future__ import annotations

from polyaccel_deepspeed.keys import constants, readers
from polyaccel_deepspeed.names import sets
from polyaccel_deepspeed.names.constants import (
    CONSTANTS,
    LEAF_DEFAULTS,
    OFFLOAD_SECTIONS,
    OPTIMIZER_CONSTANTS,
    PARAMS,
    SCHEDULE_CONSTANTS,
    SECTIONS,
)
from polyaccel_deepspeed.names.devices import DEVICES
from polyaccel_deepspeed.names.entry import Module, Name, Status, accepted, never, yes
from polyaccel_deepspeed.names.internals import INTERNALS
from polyaccel_deepspeed.names.layers import LAYERS
from polyaccel_deepspeed.names.mixtures import MIXTURES
from polyaccel_deepspeed.names.optimizers import DEEPSPEED_OPTIMIZER, STAGE_3_OPTIMIZER, WRAPPERS, ZERO_OPTIMIZER
from polyaccel_deepspeed.names.rollouts import ROLLOUTS

BUILDERS = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "PinMemoryBuilder": "pin_memory",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "UtilsBuilder": "utils",
}
"""The `NAME` of each builder."""

DEEPSPEEDS_FILES = never(
    "polyaccel.checkpoint.CheckpointReader reads ours, `polyaccel ckpt import --from deepspeed` DeepSpeed's",
    "DeepSpeedCheckpoint",
)

_PUBLIC: dict[str, Module] = {
    "deepspeed": Module(
        "What scripts import first.",
        yes(sets.INITIALIZE, "init_distributed", "initialize")
        | yes("polyaccel", "add_config_arguments")
        | yes(sets.ENGINE, "DeepSpeedEngine")
        | DEEPSPEED_OPTIMIZER
        | yes("polyaccel_deepspeed.config", "DeepSpeedConfig")
        | yes("polyaccel", DeepSpeedConfigError="ConfigError")
        | yes(sets.ACCELERATOR, "get_accelerator")
        | yes(sets.UTILS, "log_dist", "logger")
        | {"dist": Name(Status.YES, sets.COMM)}
        | sets.PIPE_ENGINE
        | yes("polyaccel_deepspeed.pipeline.module", "PipelineModule")
        | yes("polyaccel_deepspeed.engine.hybrid", "DeepSpeedHybridEngine")
        | yes(sets.TENSORS, "set_autotp_mode", "tp_model_init")
        | yes("polyaccel_deepspeed.muon", "set_optimizer_flags")
        | accepted(
            "a config with per_head_muon is refused, so no parameter has heads to count",
            *("polyaccel_deepspeed.muon", "resolve_per_head_muon_after_sharding"),
        )
        | yes(sets.UTILS, "OnDevice")
        | yes(sets.LOADER, "DeepSpeedDataLoader")
        | yes("polyaccel_deepspeed.inference", "InferenceEngine", "default_inference_config", "init_inference")
        | never(sets.KERNELS, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
    ),
    "deepspeed.accelerator": Module(
        "The device.",
        yes(sets.ACCELERATOR, "get_accelerator", "is_current_accelerator_supported")
        | yes(sets.ACCELERATOR, "DeepSpeedAccelerator")
        | yes(sets.ACCELERATOR, "set_accelerator"),
    ),
    "deepspeed.accelerator.real_accelerator": Module(
        "The device.", yes(sets.ACCELERATOR, "get_accelerator", "is_current_accelerator_supported", "set_accelerator")
    ),
    **DEVICES,
    "deepspeed.accelerator.abstract_accelerator": Module("Its class.", yes(sets.ACCELERATOR, "DeepSpeedAccelerator")),
    "deepspeed.checkpoint": Module(
        "Saved states.", dict(CONSTANTS["deepspeed.checkpoint.constants"].names) | DEEPSPEEDS_FILES
    ),
    "deepspeed.checkpoint.utils": Module(
        "What is copied to be saved.", yes(sets.UTILS, "clone_tensors_for_torch_save")
    ),
    "deepspeed.checkpoint.deepspeed_checkpoint": Module("DeepSpeed's files.", DEEPSPEEDS_FILES),
    "deepspeed.checkpoint.ds_to_universal": Module(
        "Universal checkpoints.",
        yes("polyaccel_deepspeed.universal", "main", "parse_arguments")
        | never(
            "a step of the conversion, which is one call here",
            *("atoi", "dp_index_to_str", "dump_param_fragment", "extract_zero_shards", "extract_zero_shards_stage3"),
            *("merge_tp_slices", "merge_zero3_slices", "natural_keys"),
        ),
    ),
    "deepspeed.checkpointing": Module(
        "Activation checkpointing.",
        sets.CHECKPOINTING
        | yes("polyaccel_deepspeed.config", "DeepSpeedConfig")
        | yes(sets.ACCELERATOR, "get_accelerator")
        | yes(sets.UTILS, "move_to_device")
        | yes("polyaccel.utils", "see_memory_usage")
        | yes(sets.GROUPS, "bwc_tensor_model_parallel_rank"),
    ),
    "deepspeed.comm": Module(
        "Collectives.", sets.COLLECTIVES | sets.COMM_LOG | yes(sets.ACCELERATOR, "get_accelerator")
    ),
    "deepspeed.comm.comm": Module("Collectives.", sets.COLLECTIVES | sets.COMM_LOG),
    "deepspeed.elasticity": Module(
        "Batches for many numbers of GPUs, as DeepSpeed had them until 0.19.6.",
        sets.ELASTIC | sets.ELASTIC_CONSTANTS | sets.ELASTIC_AGENT,
    ),
    "deepspeed.elasticity.config": Module("Their section and errors.", sets.ELASTIC_ERRORS),
    "deepspeed.elasticity.constants": Module("Their names.", sets.ELASTIC_CONSTANTS),
    "deepspeed.elasticity.elastic_agent": Module("Their agent.", sets.ELASTIC_AGENT),
    "deepspeed.elasticity.elasticity": Module("Their computation.", sets.ELASTIC | sets.ELASTIC_ERRORS),
    "deepspeed.env_report": Module(
        "The command `ds_report`.",
        yes(
            "polyaccel_deepspeed.env_report",
            *("END", "FAIL", "GREEN", "INFO", "OKAY", "RED", "SUCCESS", "WARNING", "YELLOW"),
            *("cli_main", "color_len", "debug_report", "get_shm_size", "human_readable_size", "main", "nvcc_version"),
            *("okay", "op_report", "parse_arguments", "warning"),
        )
        | never("no Ascend device has a plugin", "installed_cann_path", "installed_cann_version"),
    ),
    "deepspeed.git_version_info": Module(
        "What was installed.",
        yes("polyaccel_deepspeed.version", "accelerator_name", "git_branch", "git_hash", "installed_ops", "torch_info")
        | yes("polyaccel_deepspeed.version", version="__version__"),
    ),
    "deepspeed.launcher": Module("The launcher."),
    "deepspeed.launcher.launch": Module(
        "The ranks of a host.",
        yes("polyaccel_deepspeed.node_launcher", "main", "parse_args", "terminate_process_tree"),
    ),
    "deepspeed.launcher.runner": Module(
        "The launcher.",
        yes("polyaccel_deepspeed.launcher", "DEEPSPEED_ENVIRONMENT_NAME")
        | yes("polyaccel_deepspeed.hosts", DLTS_HOSTFILE="DEFAULT_HOSTFILE")
        | yes(sets.COMMANDS, main="launch_or_raise")
        | yes(
            "polyaccel_deepspeed.resources",
            *("apply_num_nodes_and_gpus", "encode_world_info", "fetch_hostfile", "parse_inclusion_exclusion"),
            *("parse_node_config", "parse_node_config_list", "parse_resource_filter"),
        ),
    ),
    "deepspeed.linear": Module(
        "Linear layers with adapters.",
        yes("polyaccel_deepspeed.linear", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora")
        | yes("polyaccel_deepspeed.linear_init", "Init"),
    ),
    "deepspeed.linear.config": Module(
        "Settings of linear layers with adapters.",
        yes("polyaccel_deepspeed.linear", "LoRAConfig", "QuantizationConfig"),
    ),
    "deepspeed.linear.context_manager": Module(
        "Models whose linear layers get adapters.",
        yes("polyaccel_deepspeed.linear", "init_lora") | yes("polyaccel_deepspeed.linear_init", "Init"),
    ),
    "deepspeed.linear.quantization": Module(
        "Linear layers with a frozen weight in codes.",
        yes("polyaccel_deepspeed.linear", "QuantizedLinear")
        | never("a parameter in floats of few bits; QuantizedLinear has codes and scales", "QuantizedParameter"),
    ),
    "deepspeed.linear.optimized_linear": Module(
        "Linear layers with adapters.", yes("polyaccel_deepspeed.linear", "LoRAOptimizedLinear", "OptimizedLinear")
    ),
    **CONSTANTS,
    **MIXTURES,
    **ROLLOUTS,
    **WRAPPERS,
    **LAYERS,
    "deepspeed.monitor": Module("Figures of a run."),
    "deepspeed.monitor.monitor": Module(
        "Figures of a run.", yes("polyaccel_deepspeed.engine.monitor", "MonitorMaster")
    ),
    "deepspeed.ops": Module(
        "Optimizers and kernels.", yes("polyaccel_deepspeed.op_builder", __compatible_ops__="COMPATIBLE_OPS")
    ),
    "deepspeed.ops.adagrad": Module("Adagrad.", sets.ADAGRAD),
    "deepspeed.ops.adagrad.cpu_adagrad": Module("Adagrad.", sets.ADAGRAD),
    "deepspeed.ops.adam": Module("Adam.", sets.ADAM),
    "deepspeed.ops.adam.cpu_adam": Module("Adam.", yes(sets.OPTIMIZERS, "DeepSpeedCPUAdam")),
    "deepspeed.ops.adam.fused_adam": Module("Adam.", yes(sets.OPTIMIZERS, "FusedAdam")),
    "deepspeed.ops.aio": Module("Files.", yes("polyaccel_deepspeed.op_builder", "AsyncIOBuilder")),
    "deepspeed.ops.lamb": Module("LAMB.", sets.LAMB),
    "deepspeed.ops.lamb.fused_lamb": Module("LAMB.", sets.LAMB),
    "deepspeed.ops.lion": Module("Lion.", sets.LION),
    "deepspeed.ops.lion.cpu_lion": Module("Lion.", yes(sets.OPTIMIZERS, "DeepSpeedCPULion")),
    "deepspeed.ops.lion.fused_lion": Module("Lion.", yes(sets.OPTIMIZERS, "FusedLion")),
    "deepspeed.ops.op_builder": Module(
        "Native parts, of which there is nothing to build.",
        accepted(
            "there is nothing to build: kernels come with polyaccel's package",
            "polyaccel_deepspeed.op_builder",
            "OpBuilder",
            *BUILDERS,
        ),
    ),
    "deepspeed.ops.transformer": Module(
        "Transformer layers.", never(sets.KERNELS, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")
    ),
    "deepspeed.pipe": Module("Pipelines.", sets.PIPE),
    "deepspeed.profiling": Module("Counting operations."),
    "deepspeed.profiling.flops_profiler": Module("Counting operations.", sets.FLOPS),
    "deepspeed.profiling.flops_profiler.profiler": Module("Counting operations.", sets.FLOPS),
    "deepspeed.runtime": Module("The parts of the engine."),
    "deepspeed.runtime.activation_checkpointing": Module("Activation checkpointing."),
    "deepspeed.runtime.activation_checkpointing.checkpointing": Module("Activation checkpointing.", sets.CHECKPOINTING),
    "deepspeed.runtime.config": Module(
        "The config.",
        yes("polyaccel_deepspeed.config", "DeepSpeedConfig")
        | yes("polyaccel", DeepSpeedConfigError="ConfigError")
        | yes(readers.__name__, *(name for name in vars(readers) if name.startswith("get_") and name not in PARAMS))
        | OPTIMIZER_CONSTANTS,
    ),
    "deepspeed.runtime.config_utils": Module(
        "Sections of the config.",
        yes("polyaccel_deepspeed.config_sections", "DeepSpeedConfigModel")
        | yes(readers.__name__, *PARAMS)
        | never(
            "DeepSpeed's own printing of its config",
            *("DeepSpeedConfigObject", "ScientificNotationEncoder", "dict_raise_error_on_duplicate_keys"),
            *("get_config_default", "pp_int"),
        ),
    ),
    "deepspeed.runtime.constants": Module(
        "Names of config keys.",
        yes("polyaccel_deepspeed.keys.constants", *filter(str.isupper, vars(constants))),
    ),
    "deepspeed.runtime.dataloader": Module(
        "Loaders.",
        yes(sets.LOADER, "DeepSpeedDataLoader", "RepeatingLoader"),
    ),
    "deepspeed.runtime.engine": Module("The engine.", yes(sets.ENGINE, "DeepSpeedEngine")),
    "deepspeed.runtime.hybrid_engine": Module(
        "Training and generation.",
        yes("polyaccel_deepspeed.engine.hybrid", "DeepSpeedHybridEngine"),
    ),
    "deepspeed.runtime.lr_schedules": Module(
        "Learning rates.",
        yes("polyaccel.engine.lr_schedules", "LRRangeTest")
        | yes("polyaccel_deepspeed.engine.schedules", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
        | yes("polyaccel_deepspeed.engine.schedules", "VALID_LR_SCHEDULES")
        | SCHEDULE_CONSTANTS
        | never("schedules by command-line arguments", "add_tuning_arguments", "get_config_from_args"),
    ),
    "deepspeed.runtime.pipe": Module("Pipelines."),
    "deepspeed.runtime.pipe.engine": Module(
        "Pipelines.",
        sets.PIPE_ENGINE
        | sets.PIPE_ERROR
        | yes(sets.GRID, "is_even")
        | yes(sets.ENGINE, "DeepSpeedEngine")
        | yes("polyaccel_deepspeed.pipeline.module", "PipelineModule"),
    ),
    "deepspeed.runtime.pipe.module": Module("Pipelines.", sets.PIPE | sets.PIPE_ERROR),
    "deepspeed.runtime.pipe.topology": Module(
        "Pipelines.",
        yes(sets.TOPOLOGY, "PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology")
        | yes(sets.GRID, "PipelineParallelGrid"),
    ),
    "deepspeed.runtime.sequence_parallel": Module("Long sequences."),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": Module(
        "Long sequences.",
        yes(sets.SEQUENCE, "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter")
        | yes(
            sets.SEQUENCE_TILES, "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute"
        ),
    ),
    "deepspeed.runtime.swap_tensor": Module(
        "Sizes of files.", yes("polyaccel_deepspeed.offload_kinds", "MIN_SWAPPABLE_BYTES")
    ),
    "deepspeed.runtime.utils": Module(
        "Tensors.",
        yes(
            sets.UTILS,
            "call_to_str",
            "ensure_directory_exists",
            "memory_status",
            "move_to_device",
            "set_random_seed",
        )
        | yes("polyaccel.utils", "see_memory_usage")
        | yes("polyaccel_deepspeed.pipeline.parts", "partition_balanced", "partition_uniform", "prefix_sum_inc")
        | yes(sets.GROUPS, "is_model_parallel_parameter")
        | yes("polyaccel_deepspeed.gradient_norms", "clip_grad_norm_"),
    ),
    "deepspeed.runtime.zero": Module("ZeRO.", sets.ZERO_NAMES),
    "deepspeed.runtime.zero.config": Module(
        "Its config.",
        yes("polyaccel_deepspeed.config", "ZeroStageEnum")
        | yes("polyaccel_deepspeed.offload_kinds", "OffloadDeviceEnum")
        | yes(SECTIONS, "DeepSpeedZeroConfig", "get_zero_config", *OFFLOAD_SECTIONS),
    ),
    "deepspeed.runtime.zero.leaf_module_config": Module(
        "Modules gathered as one.", yes(SECTIONS, "DeepSpeedZeroLeafModuleConfig", *LEAF_DEFAULTS)
    ),
    "deepspeed.runtime.zero.mics": Module("MiCS, as of DeepSpeed 0.19.5.", yes(sets.ZERO, MiCS_Init="Init")),
    "deepspeed.runtime.zero.partition_parameters": Module(
        "Sharded parameters.",
        yes(sets.ZERO, "GatheredParameters", "Init", "_orig_torch_arange", "zero_wrapper_for_fp_tensor_constructor")
        | yes(sets.PARAMETERS, "ZeroParamStatus", "ZeroParamType")
        | yes(sets.ACCELERATOR, "get_accelerator")
        | sets.EXTERNAL
        | sets.NO_EXTERNAL,
    ),
    "deepspeed.runtime.zero.stage3": Module(
        "Stage 3.", yes("polyaccel.zero", "unwrap_model_for_generation") | STAGE_3_OPTIMIZER | sets.ESTIMATES_3
    ),
    "deepspeed.runtime.zero.stage_1_and_2": Module("Stages 1 and 2.", ZERO_OPTIMIZER | sets.ESTIMATES_2),
    "deepspeed.runtime.zero.tiling": Module("Layers in tiles.", sets.TILES),
    "deepspeed.sequence": Module("Long sequences."),
    "deepspeed.sequence.layer": Module(
        "Long sequences.",
        yes(sets.SEQUENCE, "DistributedAttention")
        | yes("polyaccel_deepspeed.sequences.exchange", "apply_rotary_pos_emb", "single_all_to_all"),
    ),
    "deepspeed.utils": Module(
        "Helpers.",
        sets.LOGGING
        | sets.FRAGMENTS
        | sets.LEAVES
        | yes(sets.LOADER, "RepeatingLoader")
        | yes(sets.UTILS, "OnDevice", "instrument_w_nvtx", "recursive_getattr", "recursive_setattr")
        | yes(sets.GROUPS, *sets.TENSOR_GROUPS, "bwc_tensor_model_parallel_world_size", **sets.PARALLEL)
        | yes(sets.GRID, "bwc_pipeline_parallel_world_size")
        | yes(sets.ACCELERATOR, "get_accelerator")
        | sets.GROUPS_BY_HAND,
    ),
    "deepspeed.utils.groups": Module(
        "Groups of ranks along the axes of the mesh.",
        yes(sets.GROUPS, *sets.EXPERT_GROUPS, *sets.TENSOR_GROUPS, **sets.PARALLEL, **sets.PARALLEL_PRIVATE)
        | sets.GROUPS_BY_HAND,
    ),
    "deepspeed.utils.init_on_device": Module("Modules on a device.", yes(sets.UTILS, "OnDevice")),
    "deepspeed.utils.timer": Module("Clocks.", sets.TIMERS),
    "deepspeed.utils.nvtx": Module("Ranges of a profiler.", yes(sets.UTILS, "instrument_w_nvtx")),
    "deepspeed.utils.tensor_fragment": Module("Parameters by the piece.", sets.FRAGMENTS),
    "deepspeed.utils.z3_leaf_module": Module("Modules gathered as one.", sets.LEAVES),
    "deepspeed.utils.logging": Module("Logging.", sets.LOGGING | sets.MORE_LOGGING),
    "deepspeed.utils.zero_to_fp32": Module(
        "Whole weights of a checkpoint.",
        yes(
            sets.CHECKPOINT,
            "convert_zero_checkpoint_to_fp32_state_dict",
            "convert_zero_checkpoint_to_state_dict",
            "get_fp32_state_dict_from_zero_checkpoint",
            "get_model_state_file",
            "get_optim_files",
            "load_state_dict_from_zero_checkpoint",
        ),
    ),
    "deepspeed.zero": Module("ZeRO.", sets.ZERO_NAMES),
}

MODULES: dict[str, Module] = {
    name: Module(entry.doc, INTERNALS.get(name, {}) | dict(entry.names)) for name, entry in _PUBLIC.items()
}
"""All names, by module: those above, and what is DeepSpeed's own affair."""
