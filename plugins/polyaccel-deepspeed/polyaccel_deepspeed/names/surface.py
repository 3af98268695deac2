"""The names of DeepSpeed 0.19.8, module by module, and what stands for each here: the one table that modules, tests and
`docs/compatibility.md` are made of.
"""

from __future__ import annotations

from polyaccel_deepspeed.names.entry import Module, Name, Status, accepted, later, never, yes
from polyaccel_deepspeed.names.internals import INTERNALS
from polyaccel_deepspeed.names.mixtures import MIXTURES
from polyaccel_deepspeed.names.optimizers import DEEPSPEED_OPTIMIZER, STAGE_3_OPTIMIZER, WRAPPERS, ZERO_OPTIMIZER

BUILDERS = (
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "PinMemoryBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "ShareMemCommBuilder",
    "UtilsBuilder",
)
_ACCELERATOR = "polyaccel_deepspeed.accelerator"
_CHECKPOINT = "polyaccel_deepspeed.checkpoint"
_COMM = "polyaccel_deepspeed.comm"
_COMMANDS = "polyaccel_deepspeed.commands"
_ELASTICITY = "polyaccel_deepspeed.engine.elasticity"
_ENGINE = "polyaccel_deepspeed.engine.engine"
_INITIALIZE = "polyaccel_deepspeed.initialize"
_LOADER = "polyaccel_deepspeed.engine.loader"
_PROFILING = "polyaccel_deepspeed.engine.profiling"
_OPTIMIZERS = "polyaccel_deepspeed.engine.optimizers"
_PARAMETERS = "polyaccel_deepspeed.engine.parameters"
_SEQUENCE = "polyaccel_deepspeed.sequences.names"
_SEQUENCE_TILES = "polyaccel_deepspeed.sequences.tiles"
_TOPOLOGY = "polyaccel_deepspeed.pipeline.topology"
_UTILS = "polyaccel_deepspeed.utils"
_ZERO = "polyaccel_deepspeed.zero"

_INFERENCE = "polyaccel trains; serve models with an engine for inference"
_KERNELS = (
    "kernels of DeepSpeed's own for transformers; torch.nn.functional.scaled_dot_product_attention is what is used"
)

_ADAM = yes(_OPTIMIZERS, "DeepSpeedCPUAdam", "FusedAdam")
_ADAGRAD = yes(_OPTIMIZERS, "DeepSpeedCPUAdagrad")
_LION = yes(_OPTIMIZERS, "DeepSpeedCPULion", "FusedLion")
_LAMB = yes(_OPTIMIZERS, "FusedLamb")
_EXTERNAL = yes("polyaccel.zero", "register_external_parameter")
_NO_EXTERNAL = yes("polyaccel.zero", "unregister_external_parameter")
_PLAN = "estimates from Python; `polyaccel plan` prints them for every stage"
_ESTIMATES_2 = later(
    _PLAN, "estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live"
)
_ESTIMATES_3 = later(
    _PLAN, "estimate_zero3_model_states_mem_needs_all_cold", "estimate_zero3_model_states_mem_needs_all_live"
)
_TILES = later("linear layers in tiles; stage 3 gathers them whole", "TiledLinear", "TiledLinearReturnBias")
_ELASTIC_AGENT = never("the agent is torch's own: `polyaccel run --launcher torchelastic`", "DSElasticAgent")
_ELASTIC_ERRORS = yes(_ELASTICITY, "ElasticityError", "ElasticityConfigError", "ElasticityIncompatibleWorldSize") | yes(
    "polyaccel.config.sections.elasticity", "ElasticityConfig"
)
_ELASTIC_CONSTANTS = yes(
    _ELASTICITY,
    "DEEPSPEED_ELASTICITY_CONFIG",
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "LATEST_ELASTICITY_VERSION",
    "MINIMUM_DEEPSPEED_VERSION",
)
_ELASTIC = yes(_ELASTICITY, "compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config")
_ZERO_NAMES = (
    yes(_ZERO, "GatheredParameters", "Init")
    | yes(_PARAMETERS, "ZeroParamStatus", "ZeroParamType")
    | yes("polyaccel.zero", "unwrap_model_for_generation")
    | _EXTERNAL
    | _TILES
)
_PIPE = yes("polyaccel_deepspeed.pipeline.module", "LayerSpec", "PipelineModule", "TiedLayerSpec")
_PIPE_ENGINE = yes("polyaccel_deepspeed.pipeline.engine", "PipelineEngine")
_PIPE_ERROR = yes("polyaccel.pipeline.table", "PipelineError")
_GRID = "polyaccel_deepspeed.pipeline.grid"
_LOGGING = yes(_UTILS, "log_dist", "log_dist_once", "logger", "set_log_level_from_string")
_MORE_LOGGING = yes(
    _UTILS, "get_current_level", "get_log_level_from_string", "print_dist", "print_json_dist", "should_log_le"
)
_LEAVES = yes(
    "polyaccel.utils",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
) | yes(_UTILS, "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix")
_FRAGMENTS = yes(
    "polyaccel.utils",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
) | yes(_UTILS, "safe_update_full_grad_vectorized")
_GROUPS = "polyaccel_deepspeed.engine.groups"
_PARALLEL = {
    **{
        f"get_{kind}_{what}": f"get_{kind}_{what}"
        for kind in ("data_parallel", "tensor_model_parallel")
        for what in ("group", "rank", "world_size")
    },
    **{f"get_model_parallel_{what}": f"get_tensor_model_parallel_{what}" for what in ("group", "rank", "world_size")},
}
_PARALLEL_PRIVATE = {
    **{f"_get_data_parallel_{what}": f"get_data_parallel_{what}" for what in ("group", "rank", "world_size")},
    **{f"_get_sequence_parallel_{what}": f"get_sequence_parallel_{what}" for what in ("group", "rank", "world_size")},
    "_get_model_parallel_world_size": "get_tensor_model_parallel_world_size",
}
_EXPERT_GROUPS = (
    *(
        f"_get_expert_{kind}parallel_{what}"
        for kind in ("", "data_")
        for what in ("group", "group_dict", "group_ranks", "rank", "world_size")
    ),
    "_get_max_expert_parallel_group",
    "_get_max_expert_size",
    "_get_max_expert_size_name",
)
_GROUPS_BY_HAND = never(
    "deprecated in DeepSpeed itself; MoE(ep_size=N) says how many ranks share experts", "initialize"
)
_COLLECTIVES = yes(
    _COMM,
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_local_rank_from_launcher",
    "get_rank",
    "get_world_group",
    "get_world_rank_from_launcher",
    "get_world_size",
    "get_world_size_from_launcher",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
) | accepted('the section "comms_logger" of the engine\'s config chooses', _COMM, "configure")
_FLOPS = yes(_PROFILING, "FlopsProfiler", "get_model_profile")
_CHECKPOINTING = yes(
    "polyaccel.checkpointing", "checkpoint", "is_configured", "non_reentrant_checkpoint", "reset"
) | yes(
    "polyaccel_deepspeed.activations",
    "CudaRNGStatesTracker",
    "configure",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
)

_PUBLIC: dict[str, Module] = {
    "deepspeed": Module(
        "What scripts import first.",
        yes(_INITIALIZE, "init_distributed", "initialize")
        | yes("polyaccel", "add_config_arguments")
        | yes(_ENGINE, "DeepSpeedEngine")
        | DEEPSPEED_OPTIMIZER
        | yes("polyaccel_deepspeed.config", "DeepSpeedConfig")
        | yes("polyaccel", DeepSpeedConfigError="ConfigError")
        | yes(_ACCELERATOR, "get_accelerator")
        | yes(_UTILS, "log_dist", "logger")
        | {"dist": Name(Status.YES, _COMM)}
        | _PIPE_ENGINE
        | yes("polyaccel_deepspeed.pipeline.module", "PipelineModule")
        | later("training and generation in one engine; zero.unwrap_model_for_generation", "DeepSpeedHybridEngine")
        | yes("polyaccel_deepspeed.engine.tensors", "set_autotp_mode", "tp_model_init")
        | yes(_UTILS, "OnDevice")
        | yes(_LOADER, "DeepSpeedDataLoader")
        | never(_INFERENCE, "InferenceEngine", "default_inference_config", "init_inference")
        | never(_KERNELS, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
    ),
    "deepspeed.accelerator": Module(
        "The device.",
        yes(_ACCELERATOR, "get_accelerator", "is_current_accelerator_supported")
        | yes(_ACCELERATOR, "DeepSpeedAccelerator")
        | later("replacing the device in a process; DS_ACCELERATOR names a plugin", "set_accelerator"),
    ),
    "deepspeed.accelerator.real_accelerator": Module(
        "The device.", yes(_ACCELERATOR, "get_accelerator", "is_current_accelerator_supported")
    ),
    "deepspeed.accelerator.abstract_accelerator": Module("Its class.", yes(_ACCELERATOR, "DeepSpeedAccelerator")),
    "deepspeed.checkpoint": Module("Saved states."),
    "deepspeed.checkpoint.utils": Module("What is copied to be saved.", yes(_UTILS, "clone_tensors_for_torch_save")),
    "deepspeed.checkpointing": Module(
        "Activation checkpointing.",
        _CHECKPOINTING
        | yes("polyaccel_deepspeed.config", "DeepSpeedConfig")
        | yes(_ACCELERATOR, "get_accelerator")
        | yes(_UTILS, "move_to_device")
        | yes("polyaccel.utils", "see_memory_usage"),
    ),
    "deepspeed.comm": Module("Collectives.", _COLLECTIVES | yes(_ACCELERATOR, "get_accelerator")),
    "deepspeed.comm.comm": Module("Collectives.", _COLLECTIVES),
    "deepspeed.elasticity": Module(
        "Batches for many numbers of GPUs, as DeepSpeed had them until 0.19.6.",
        _ELASTIC | _ELASTIC_CONSTANTS | _ELASTIC_AGENT,
    ),
    "deepspeed.elasticity.config": Module("Their section and errors.", _ELASTIC_ERRORS),
    "deepspeed.elasticity.constants": Module("Their names.", _ELASTIC_CONSTANTS),
    "deepspeed.elasticity.elastic_agent": Module("Their agent.", _ELASTIC_AGENT),
    "deepspeed.elasticity.elasticity": Module("Their computation.", _ELASTIC | _ELASTIC_ERRORS),
    "deepspeed.launcher": Module("The launcher."),
    "deepspeed.launcher.runner": Module(
        "The launcher.",
        yes("polyaccel_deepspeed.launcher", "DEEPSPEED_ENVIRONMENT_NAME") | yes(_COMMANDS, main="launch"),
    ),
    "deepspeed.linear": Module(
        "Linear layers with adapters.",
        never("PEFT's layers, which polyaccel shards", "LoRAConfig", "OptimizedLinear", "QuantizationConfig"),
    ),
    **MIXTURES,
    **WRAPPERS,
    "deepspeed.monitor": Module("Figures of a run."),
    "deepspeed.monitor.monitor": Module(
        "Figures of a run.", yes("polyaccel_deepspeed.engine.monitor", "MonitorMaster")
    ),
    "deepspeed.ops": Module("Optimizers and kernels."),
    "deepspeed.ops.adagrad": Module("Adagrad.", _ADAGRAD),
    "deepspeed.ops.adagrad.cpu_adagrad": Module("Adagrad.", _ADAGRAD),
    "deepspeed.ops.adam": Module("Adam.", _ADAM),
    "deepspeed.ops.adam.cpu_adam": Module("Adam.", yes(_OPTIMIZERS, "DeepSpeedCPUAdam")),
    "deepspeed.ops.adam.fused_adam": Module("Adam.", yes(_OPTIMIZERS, "FusedAdam")),
    "deepspeed.ops.aio": Module(
        "Files.", never("offload_optimizer and offload_param with the device nvme", "AsyncIOBuilder")
    ),
    "deepspeed.ops.lamb": Module("LAMB.", _LAMB),
    "deepspeed.ops.lamb.fused_lamb": Module("LAMB.", _LAMB),
    "deepspeed.ops.lion": Module("Lion.", _LION),
    "deepspeed.ops.lion.cpu_lion": Module("Lion.", yes(_OPTIMIZERS, "DeepSpeedCPULion")),
    "deepspeed.ops.lion.fused_lion": Module("Lion.", yes(_OPTIMIZERS, "FusedLion")),
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
        "Transformer layers.", never(_KERNELS, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")
    ),
    "deepspeed.pipe": Module("Pipelines.", _PIPE),
    "deepspeed.profiling": Module("Counting operations."),
    "deepspeed.profiling.flops_profiler": Module("Counting operations.", _FLOPS),
    "deepspeed.profiling.flops_profiler.profiler": Module("Counting operations.", _FLOPS),
    "deepspeed.runtime": Module("The parts of the engine."),
    "deepspeed.runtime.activation_checkpointing": Module("Activation checkpointing."),
    "deepspeed.runtime.activation_checkpointing.checkpointing": Module("Activation checkpointing.", _CHECKPOINTING),
    "deepspeed.runtime.config": Module(
        "The config.",
        yes("polyaccel_deepspeed.config", "DeepSpeedConfig") | yes("polyaccel", DeepSpeedConfigError="ConfigError"),
    ),
    "deepspeed.runtime.dataloader": Module(
        "Loaders.",
        yes(_LOADER, "DeepSpeedDataLoader", "RepeatingLoader"),
    ),
    "deepspeed.runtime.engine": Module("The engine.", yes(_ENGINE, "DeepSpeedEngine")),
    "deepspeed.runtime.hybrid_engine": Module(
        "Training and generation.",
        later("training and generation in one engine; zero.unwrap_model_for_generation", "DeepSpeedHybridEngine"),
    ),
    "deepspeed.runtime.lr_schedules": Module(
        "Learning rates.",
        yes("polyaccel.engine.lr_schedules", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
        | yes("polyaccel_deepspeed.config", "VALID_LR_SCHEDULES")
        | later("schedules by command-line arguments", "add_tuning_arguments", "get_config_from_args"),
    ),
    "deepspeed.runtime.pipe": Module("Pipelines."),
    "deepspeed.runtime.pipe.engine": Module(
        "Pipelines.",
        _PIPE_ENGINE
        | _PIPE_ERROR
        | yes(_GRID, "is_even")
        | yes(_ENGINE, "DeepSpeedEngine")
        | yes("polyaccel_deepspeed.pipeline.module", "PipelineModule"),
    ),
    "deepspeed.runtime.pipe.module": Module("Pipelines.", _PIPE | _PIPE_ERROR),
    "deepspeed.runtime.pipe.topology": Module(
        "Pipelines.",
        yes(_TOPOLOGY, "PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology")
        | yes(_GRID, "PipelineParallelGrid"),
    ),
    "deepspeed.runtime.sequence_parallel": Module("Long sequences."),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": Module(
        "Long sequences.",
        yes(_SEQUENCE, "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter")
        | yes(_SEQUENCE_TILES, "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute"),
    ),
    "deepspeed.runtime.utils": Module(
        "Tensors.",
        yes(
            _UTILS,
            "call_to_str",
            "ensure_directory_exists",
            "move_to_device",
            "set_random_seed",
        )
        | yes("polyaccel.utils", "see_memory_usage"),
    ),
    "deepspeed.runtime.zero": Module("ZeRO.", _ZERO_NAMES),
    "deepspeed.runtime.zero.config": Module("Its config.", yes("polyaccel_deepspeed.config", "ZeroStageEnum")),
    "deepspeed.runtime.zero.partition_parameters": Module(
        "Sharded parameters.",
        yes(_ZERO, "GatheredParameters", "Init", "_orig_torch_arange", "zero_wrapper_for_fp_tensor_constructor")
        | yes(_PARAMETERS, "ZeroParamStatus", "ZeroParamType")
        | yes(_ACCELERATOR, "get_accelerator")
        | _EXTERNAL
        | _NO_EXTERNAL,
    ),
    "deepspeed.runtime.zero.stage3": Module(
        "Stage 3.", yes("polyaccel.zero", "unwrap_model_for_generation") | STAGE_3_OPTIMIZER | _ESTIMATES_3
    ),
    "deepspeed.runtime.zero.stage_1_and_2": Module("Stages 1 and 2.", ZERO_OPTIMIZER | _ESTIMATES_2),
    "deepspeed.runtime.zero.tiling": Module("Layers in tiles.", _TILES),
    "deepspeed.sequence": Module("Long sequences."),
    "deepspeed.sequence.layer": Module("Long sequences.", yes(_SEQUENCE, "DistributedAttention")),
    "deepspeed.utils": Module(
        "Helpers.",
        _LOGGING
        | _FRAGMENTS
        | _LEAVES
        | yes(_LOADER, "RepeatingLoader")
        | yes(_UTILS, "OnDevice", "instrument_w_nvtx", "recursive_getattr", "recursive_setattr")
        | yes(_GROUPS, **_PARALLEL)
        | yes(_GRID, "bwc_pipeline_parallel_world_size")
        | yes(_ACCELERATOR, "get_accelerator")
        | _GROUPS_BY_HAND,
    ),
    "deepspeed.utils.groups": Module(
        "Groups of ranks along the axes of the mesh.",
        yes(_GROUPS, *_EXPERT_GROUPS, **_PARALLEL, **_PARALLEL_PRIVATE) | _GROUPS_BY_HAND,
    ),
    "deepspeed.utils.init_on_device": Module("Modules on a device.", yes(_UTILS, "OnDevice")),
    "deepspeed.utils.nvtx": Module("Ranges of a profiler.", yes(_UTILS, "instrument_w_nvtx")),
    "deepspeed.utils.tensor_fragment": Module("Parameters by the piece.", _FRAGMENTS),
    "deepspeed.utils.z3_leaf_module": Module("Modules gathered as one.", _LEAVES),
    "deepspeed.utils.logging": Module("Logging.", _LOGGING | _MORE_LOGGING),
    "deepspeed.utils.zero_to_fp32": Module(
        "Whole weights of a checkpoint.",
        yes(
            _CHECKPOINT,
            "convert_zero_checkpoint_to_fp32_state_dict",
            "convert_zero_checkpoint_to_state_dict",
            "get_fp32_state_dict_from_zero_checkpoint",
            "get_model_state_file",
            "get_optim_files",
            "load_state_dict_from_zero_checkpoint",
        ),
    ),
    "deepspeed.zero": Module("ZeRO.", _ZERO_NAMES),
}

MODULES: dict[str, Module] = {
    name: Module(entry.doc, INTERNALS.get(name, {}) | dict(entry.names)) for name, entry in _PUBLIC.items()
}
"""All names, by module: those above, and what is DeepSpeed's own affair."""
