"""Sets of names that several modules of DeepSpeed have, and where in this package each name is found."""

from __future__ import annotations

from polyaccel_deepspeed.names.entry import accepted, never, yes

ACCELERATOR = "polyaccel_deepspeed.accelerator"
CHECKPOINT = "polyaccel_deepspeed.checkpoint"
COMM = "polyaccel_deepspeed.comm"
COMMANDS = "polyaccel_deepspeed.commands"
ELASTICITY = "polyaccel_deepspeed.engine.elasticity"
ENGINE = "polyaccel_deepspeed.engine.engine"
INITIALIZE = "polyaccel_deepspeed.initialize"
LOADER = "polyaccel_deepspeed.engine.loader"
PROFILING = "polyaccel_deepspeed.engine.profiling"
OPTIMIZERS = "polyaccel_deepspeed.engine.optimizers"
PARAMETERS = "polyaccel_deepspeed.engine.parameters"
SEQUENCE = "polyaccel_deepspeed.sequences.names"
SEQUENCE_TILES = "polyaccel_deepspeed.sequences.tiles"
TENSORS = "polyaccel_deepspeed.engine.tensors"
TOPOLOGY = "polyaccel_deepspeed.pipeline.topology"
UTILS = "polyaccel_deepspeed.utils"
ZERO = "polyaccel_deepspeed.zero"

KERNELS = (
    "kernels of DeepSpeed's own for transformers; torch.nn.functional.scaled_dot_product_attention is what is used"
)

ADAM = yes(OPTIMIZERS, "DeepSpeedCPUAdam", "FusedAdam")
ADAGRAD = yes(OPTIMIZERS, "DeepSpeedCPUAdagrad")
LION = yes(OPTIMIZERS, "DeepSpeedCPULion", "FusedLion")
LAMB = yes(OPTIMIZERS, "FusedLamb")
EXTERNAL = yes("polyaccel.zero", "register_external_parameter")
NO_EXTERNAL = yes("polyaccel.zero", "unregister_external_parameter")
ESTIMATES = "polyaccel_deepspeed.estimates"
ESTIMATES_2 = yes(
    ESTIMATES,
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
)
ESTIMATES_3 = yes(
    ESTIMATES,
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
)
TILES = yes("polyaccel_deepspeed.tiled_linear", "TiledLinear", "TiledLinearReturnBias")
ELASTIC_AGENT = never("the agent is torch's own: `polyaccel run --launcher torchelastic`", "DSElasticAgent")
ELASTIC_ERRORS = yes(ELASTICITY, "ElasticityError", "ElasticityConfigError", "ElasticityIncompatibleWorldSize") | yes(
    "polyaccel.config.sections.elasticity", "ElasticityConfig"
)
ELASTIC_CONSTANTS = yes(
    ELASTICITY,
    "DEEPSPEED_ELASTICITY_CONFIG",
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "LATEST_ELASTICITY_VERSION",
    "MINIMUM_DEEPSPEED_VERSION",
)
ELASTIC = yes(ELASTICITY, "compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config")
ZERO_NAMES = (
    yes(ZERO, "GatheredParameters", "Init", MiCS_Init="Init")
    | yes(PARAMETERS, "ZeroParamStatus", "ZeroParamType")
    | yes("polyaccel.zero", "unwrap_model_for_generation")
    | EXTERNAL
    | TILES
)
PIPE = yes("polyaccel_deepspeed.pipeline.module", "LayerSpec", "PipelineModule", "TiedLayerSpec")
PIPE_ENGINE = yes("polyaccel_deepspeed.pipeline.engine", "PipelineEngine")
PIPE_ERROR = yes("polyaccel.pipeline.table", "PipelineError")
GRID = "polyaccel_deepspeed.pipeline.grid"
LOGGING = yes(UTILS, "log_dist", "log_dist_once", "logger", "set_log_level_from_string")
MORE_LOGGING = yes(
    UTILS, "get_current_level", "get_log_level_from_string", "print_dist", "print_json_dist", "should_log_le"
)
LEAVES = yes(
    "polyaccel.utils",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
) | yes(UTILS, "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix")
FRAGMENTS = yes(
    "polyaccel.utils",
    "safe_get_full_fp32_param",
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
) | yes(UTILS, "safe_get_full_grad", "safe_update_full_grad_vectorized")
GROUPS = "polyaccel_deepspeed.engine.groups"
PARALLEL = {
    **{
        f"get_{kind}_{what}": f"get_{kind}_{what}"
        for kind in ("data_parallel", "tensor_model_parallel")
        for what in ("group", "rank", "world_size")
    },
    **{f"get_model_parallel_{what}": f"get_tensor_model_parallel_{what}" for what in ("group", "rank", "world_size")},
}
PARALLEL_PRIVATE = {
    "_get_data_parallel_group": "_get_data_parallel_group",
    **{f"_get_data_parallel_{what}": f"get_data_parallel_{what}" for what in ("rank", "world_size")},
    **{f"_get_sequence_parallel_{what}": f"get_sequence_parallel_{what}" for what in ("group", "rank", "world_size")},
    "_get_model_parallel_world_size": "get_tensor_model_parallel_world_size",
}
TENSOR_GROUPS = ("get_tensor_model_parallel_src_rank",)
EXPERT_GROUPS = (
    *(
        f"_get_expert_{kind}parallel_{what}"
        for kind in ("", "data_")
        for what in ("group", "group_dict", "group_ranks", "rank", "world_size")
    ),
    "_get_max_expert_parallel_group",
    "_get_max_expert_size",
    "_get_max_expert_size_name",
)
GROUPS_BY_HAND = never("deprecated in DeepSpeed itself; MoE(ep_size=N) sets how many ranks share experts", "initialize")
COMM_LOG = yes(
    "polyaccel_deepspeed.comm_log",
    "comms_logger",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "reset_log",
)
COLLECTIVES = yes(
    COMM,
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
) | accepted('the section "comms_logger" of the engine\'s config chooses', COMM, "configure")
FLOPS = yes(PROFILING, "FlopsProfiler", "get_model_profile")
CHECKPOINTING = yes(
    "polyaccel.checkpointing", "checkpoint", "is_configured", "non_reentrant_checkpoint", "reset"
) | yes(
    "polyaccel_deepspeed.activations",
    "CudaRNGStatesTracker",
    "configure",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
)
TIMERS = yes(
    "polyaccel_deepspeed.engine.timers",
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "CudaEventTimer",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "NoopTimer",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "trim_mean",
)
