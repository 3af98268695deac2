"""The names of DeepSpeed 0.19.8 that are its own affair, or belong to a feature that does not exist here: reason by
reason, then module by module. They can be imported, for scripts that only ask `isinstance`.
"""

from __future__ import annotations

from polyaccel_deepspeed import to_come
from polyaccel_deepspeed.names.entry import Name, Status

_TABLE: tuple[tuple[str, dict[str, str]], ...] = (
    (
        'a PipelineModule trains by this schedule where the config has "pipeline": {"schedule": "dualpipe-v"}',
        {
            "deepspeed": "DualPipeVEngine DualPipeVModule",
            "deepspeed.pipe": "DualPipeVModule",
        },
    ),
    (
        "every rank computes whole images; sequence_parallel_size cuts the tokens of the language model",
        {
            "deepspeed.sequence": "InternVLFusionAdapter LlavaFusionAdapter ModalityFusionSPAdapter "
            "Qwen2VLFusionAdapter SPModelInfo UlyssesSPViTAttention auto_wrap_model_for_sp detect_model_sp_info",
        },
    ),
    (
        "tensor_parallel.vocab_parallel_lm_head cuts the vocabulary, and the model's own loss is computed over it",
        {
            "deepspeed.sequence": "VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss "
            "configure_vocab_parallel_loss vocab_parallel_cross_entropy",
        },
    ),
    (
        "a step inside DeepSpeed's attention; DistributedAttention exchanges heads and tokens",
        {
            "deepspeed.runtime.sequence_parallel.ulysses_sp": "AutogradComputeMLP",
            "deepspeed.sequence.layer": "post_all2all pre_all2all_fun register_all_to_all_group uneven_heads_all2all",
        },
    ),
    (
        "sizes and places of ranks are the mesh's; tensor_parallel.autotp_size cuts the weights",
        {
            "deepspeed": "merge_tp_model_init_into_config record_tp_model_init_args",
            "deepspeed.utils": "set_tensor_model_parallel_rank set_tensor_model_parallel_world_size",
            "deepspeed.utils.groups": "set_tensor_model_parallel_rank set_tensor_model_parallel_world_size",
        },
    ),
    (
        "layers that DeepSpeed puts in place of a model's; init_inference keeps the model's and takes a dict",
        {
            "deepspeed": "DeepSpeedInferenceConfig replace_transformer_layer",
            "deepspeed.ops.transformer": "DeepSpeedInferenceConfig DeepSpeedMoEInference "
            "DeepSpeedMoEInferenceConfig DeepSpeedTransformerInference",
        },
    ),
    (
        to_come.ZENFLOW,
        {
            "deepspeed.ops.adam": "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
        },
    ),
    (
        "a native part that polyaccel has no use for",
        {
            "deepspeed.ops.op_builder": "DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder "
            "FlashAttentionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder "
            "NotImplementedBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder "
            "SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder builder_closure "
            "get_default_compute_capabilities",
        },
    ),
    (
        "parts of DeepSpeed's profiler; FlopsProfiler and get_model_profile count and print",
        {
            "deepspeed.profiling.flops_profiler": "MoE bytes_to_string duration_to_string flops_to_string "
            "get_accelerator get_module_duration get_module_flops get_module_macs macs_to_string "
            "number_to_string params_to_string required_torch_version wrapFunc",
            "deepspeed.profiling.flops_profiler.profiler": "bytes_to_string duration_to_string flops_to_string "
            "get_module_duration get_module_flops get_module_macs macs_to_string number_to_string "
            "params_to_string wrapFunc",
        },
    ),
    (
        "DeepSpeed's reading of its config; DeepSpeedConfig reads one",
        {
            "deepspeed": "load_ds_config",
            "deepspeed.runtime.config": "DeepSpeedConfigWriter DtypeEnum HybridEngineConfig get_expert_parallel_config "
            "get_hybrid_engine_config get_torch_autocast_dtype",
            "deepspeed.runtime.zero.config": "read_zero_config_deprecated",
        },
    ),
    (
        "a part of DeepSpeed's launcher; the command `deepspeed` starts ranks",
        {
            "deepspeed.launcher.runner": "parse_args run_autotuning",
            "deepspeed.utils.numa": "check_for_numactl_pkg get_numa_cores get_numactl_cmd",
            "deepspeed.utils": "get_numactl_cmd",
        },
    ),
    (
        "the log of collectives by call; `comms_logger` in the config records the engine's",
        {
            "deepspeed.comm": "CommsLogger get_caller_func get_debug_log_name "
            "get_default_args get_msg_size_from_args get_tensor_kwarg get_tensor_position timed_op",
            "deepspeed.comm.comm": "timed_op",
        },
    ),
    (
        "schedules by command-line arguments",
        {
            "deepspeed.runtime.lr_schedules": "get_lr_from_config get_torch_optimizer override_1cycle_params "
            "override_lr_range_test_params override_params override_warmupCosineLR_params "
            "override_warmupLR_params parse_arguments update_lr",
        },
    ),
    (
        "a part of DeepSpeed's communication; init_distributed reads every launcher's variables",
        {
            "deepspeed.comm": "CCLBackend TorchBackend enable_symm_mem_for_group in_aml in_aws_sm in_dlts "
            "init_deepspeed_backend mpi_discovery patch_aml_env_for_torch_nccl_backend "
            "patch_aws_sm_env_for_torch_nccl_backend set_backend",
            "deepspeed.comm.comm": "enable_symm_mem_for_group in_aml in_aws_sm in_dlts init_deepspeed_backend "
            "mpi_discovery patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend "
            "set_backend",
        },
    ),
    (
        "polyaccel's checkpoints do not have these files; get_fp32_state_dict_from_zero_checkpoint reads them",
        {
            "deepspeed.checkpoint.utils": "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank "
            "get_zero_ckpt_name_for_rank",
            "deepspeed.utils.zero_to_fp32": "GatheredTensor atoi get_checkpoint_files get_model_state_files "
            "natural_keys parse_model_states parse_optim_states to_torch_tensor zero3_partitioned_param_info "
            "zero_model_state",
        },
    ),
    (
        "a part of DeepSpeed's activation checkpointing; `checkpoint` is one function here",
        {
            "deepspeed.checkpointing": "CheckpointFunction Timers copy_to_device "
            "detach_variable extract_tensors gather_partitioned_activations get_cpu_activations_for_backward "
            "get_offloaded_activations_for_backward get_partition_size get_partition_start "
            "get_partitioned_activations_for_backward is_activation_to_checkpoint merge_tensors "
            "partition_activations partition_activations_in_checkpoint restore_offloaded_activations "
            "set_num_layers",
            "deepspeed.runtime.activation_checkpointing.checkpointing": "CheckpointFunction "
            "detach_variable extract_tensors gather_partitioned_activations get_cpu_activations_for_backward "
            "get_offloaded_activations_for_backward get_partition_size get_partition_start "
            "get_partitioned_activations_for_backward is_activation_to_checkpoint merge_tensors "
            "partition_activations partition_activations_in_checkpoint restore_offloaded_activations "
            "set_num_layers",
        },
    ),
    (
        "pieces of DeepSpeed's flat buffers; the functions safe_get_* and safe_set_* read and write parameters",
        {
            "deepspeed.utils": "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping "
            "lazy_init_hp_params_optimizer_state link_hp_params map_to_flat_opt_states set_full_hp_grad "
            "set_full_hp_param tensor_fragment",
            "deepspeed.utils.tensor_fragment": "fragment_address get_full_hp_grad get_full_hp_param "
            "get_hp_fragment_mapping map_to_flat_opt_states set_full_hp_grad set_full_hp_param "
            "tensor_fragment",
        },
    ),
    (
        "a part of DeepSpeed's engine without a counterpart",
        {
            "deepspeed.monitor.monitor": "Monitor",
            "deepspeed.runtime.base_optimizer": "BackwardHookStateManager",
            "deepspeed.runtime.engine": "EngineTimers split_half_float_double_sparse",
            "deepspeed.runtime.utils": "CheckOverflow DummyOptim OutputBackwardHookManager PartitionedTensor "
            "TLinear align_dense_tensors all_gather_dp_groups all_gather_into_tensor_dp_groups "
            "check_internal_apis_for_count_used_parameters clip_tensors_by_global_norm "
            "combine_grad_norm_groups compare_tensors_in_structures copy_to_device "
            "count_used_parameters_in_backward empty_cache filter_empty_parameters get_checkpoint_folder_size "
            "get_flattened_grad_norm get_global_norm get_global_norm_of_tensors get_grad_zeros "
            "get_inactive_params get_ma_status get_norm_with_moe_layers get_norm_with_moe_layers_fast "
            "get_only_unique_item get_tensor_bytes get_weight_norm has_inf_or_nan is_invalid_grad_norm "
            "is_optimized_parameter is_transformers_cache mask_nan_or_inf_with_val_inplace "
            "maybe_loss_for_backward noop_context noop_decorator offload_adam_states "
            "register_output_backward_hooks reload_adam_states",
            "deepspeed.runtime.zero": "DeepSpeedTensorOverride DeepSpeedZeRoOffload",
            "deepspeed.runtime.zero.partition_parameters": "AllGatherCoalescedHandle AllGatherHandle "
            "AllReduceCoalescedHandle CUDAQuantizer DeepSpeedTensorOverride "
            "InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles NoGatherCoalescedHandle "
            "NoGatherHandle QuantizationInfo debug_rank0 get_all_subclasses get_allgather_dtype "
            "get_new_tensor_fn_for_dtype print_rank_0 restore_init_context shutdown_init_context",
            "deepspeed.runtime.zero.stage3": "IPGBucketZ3 input isclose lcm model_to_params move_to_cpu print_rank_0",
            "deepspeed.runtime.zero.stage_1_and_2": "GradPartitionBufferGroup IPGBucket "
            "get_alignment_padding input isclose lcm model_to_params print_rank_msg split_half_float_double",
            "deepspeed.runtime.zero.tiling": "split_tensor_along_last_dim",
            "deepspeed.utils": "DeprecatedException get_caller_func z3_leaf_parameter",
            "deepspeed.utils.logging": "LoggerFactory get_dist_msg print_configuration",
            "deepspeed.utils.z3_leaf_module": "apply_zero_leaf_module_config z3_leaf_parameter",
            "deepspeed.zero": "DeepSpeedTensorOverride DeepSpeedZeRoOffload",
        },
    ),
)

INTERNALS: dict[str, dict[str, Name]] = {}
for _why, _modules in _TABLE:
    for _module, _names in _modules.items():
        INTERNALS.setdefault(_module, {}).update({name: Name(Status.NO, why=_why) for name in _names.split()})

_SPARSE = "a step inside DeepSpeed's engine; sparse gradients travel in their bucket, as dense ones"
_COMPILE = "DeepCompile; engine.compile is torch.compile"
_MEMBERS: dict[str, dict[str, str]] = {
    "deepspeed.DeepSpeedEngine": {
        "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain clip_fp32_gradients "
        "get_optimizer_configuration swap_tensor_config": "a step inside DeepSpeed's engine",
        "autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info_path "
        "autotuning_profile_model_info autotuning_start_profile_step": "autotuning; `polyaccel plan` compares settings",
        "random_ltd_initialize": "layers see a part of the tokens as soon as the config says so",
        "compile_zero_optimization_stage get_autosp_backend get_autotp_backend get_deepcompile_backend "
        "get_deepspeed_compile_backend register_compile_pass": _COMPILE,
        "sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain": _SPARSE,
        "print_forward_breakdown": "timers of DeepSpeed's own; engine.metrics has the phases",
        "load_moe_state_dict": "files of DeepSpeed's experts; checkpoints here have whole stacks of experts",
        "torch_autocast_lower_precision_safe_modules": "communication_data_type chooses the type for all",
    },
    "deepspeed.accelerator.DeepSpeedAccelerator": {
        "build_extension register_host_memory unregister_host_memory": "native parts of DeepSpeed's own",
    },
}
MEMBERS_ABSENT: dict[str, dict[str, Name]] = {
    owner: {name: Name(Status.NO, why=why) for names, why in table.items() for name in names.split()}
    for owner, table in _MEMBERS.items()
}
"""Members of DeepSpeed's classes that ours have not: asking for one is an AttributeError."""
