"""The names of DeepSpeed's optimizers around an optimizer, and of helpers in small modules."""

from __future__ import annotations

from polyaccel_deepspeed.names.entry import Module, never, yes

_WRAPPERS = "polyaccel_deepspeed.engine.wrappers"
_HELPERS = yes("polyaccel_deepspeed.utils", "recursive_getattr", "recursive_setattr")
_CURRICULA = "polyaccel_deepspeed.curricula"
_COMPRESS = "polyaccel_deepspeed.compression"
_COMPRESSION = yes(_COMPRESS, "init_compression", "redundancy_clean")

ZERO_OPTIMIZER = yes(_WRAPPERS, "DeepSpeedZeroOptimizer")
STAGE_3_OPTIMIZER = yes(_WRAPPERS, "DeepSpeedZeroOptimizer_Stage3")
DEEPSPEED_OPTIMIZER = yes(_WRAPPERS, "DeepSpeedOptimizer")

WRAPPERS: dict[str, Module] = {
    "deepspeed.compression": Module("Compression, as of DeepSpeed 0.19.5.", _COMPRESSION),
    "deepspeed.compression.compress": Module(
        "Compression, as of DeepSpeed 0.19.5.", _COMPRESSION | yes(_COMPRESS, "student_initialization")
    ),
    "deepspeed.compression.helper": Module(
        "Attributes by dotted names, and other classes.", _HELPERS | yes(_COMPRESS, "convert_conv1d_to_linear")
    ),
    "deepspeed.runtime.data_pipeline": Module("Data efficiency."),
    "deepspeed.runtime.data_pipeline.data_routing": Module("Random layerwise token dropping."),
    "deepspeed.runtime.data_pipeline.data_routing.helper": Module(
        "Random layerwise token dropping.",
        _HELPERS
        | yes(
            "polyaccel_deepspeed.data_pipeline",
            *("convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"),
        ),
    ),
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": Module(
        "The difficulty of each step.", yes(_CURRICULA, "CurriculumScheduler")
    ),
    "deepspeed.runtime.data_pipeline.data_sampling": Module("Samples by difficulty."),
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": Module(
        "Metrics of a dataset.", yes(_CURRICULA, "DataAnalyzer", "DistributedDataAnalyzer")
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": Module(
        "Samples by difficulty.", yes(_CURRICULA, "DeepSpeedDataSampler")
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": Module(
        "Token files.", yes("polyaccel_deepspeed.data_pipeline", "MMapIndexedDataset", "MMapIndexedDatasetBuilder")
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": Module(
        "Batches by tokens, and learning rates that follow their sizes.",
        yes(
            "polyaccel_deepspeed.variable_batches",
            *("VariableBatchSizeLR", "batch_by_seqlens", "dataloader_for_variable_batch_size"),
            "get_dataloader_and_lr_scheduler_for_variable_batch_size",
            "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
            *("lr_scheduler_for_variable_batch_size", "scale_lr"),
        ),
    ),
    "deepspeed.ops.sparse_attention": Module(
        "Attention by blocks, as of DeepSpeed 0.19.5.",
        yes(
            "polyaccel_deepspeed.sparse_attention",
            *("SparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig", "VariableSparsityConfig"),
            *("BigBirdSparsityConfig", "BSLongformerSparsityConfig", "LocalSlidingWindowSparsityConfig"),
            *("SparseSelfAttention", "BertSparseSelfAttention", "SparseAttentionUtils"),
        )
        | never("a kernel of Triton; SparseSelfAttention computes by torch", "MatMul", "Softmax"),
    ),
    "deepspeed.runtime.base_optimizer": Module(
        "The engine's optimizer.", DEEPSPEED_OPTIMIZER | yes(_WRAPPERS, "ZeROOptimizer")
    ),
    "deepspeed.runtime.bf16_optimizer": Module(
        "The engine's optimizer in bf16.",
        yes(_WRAPPERS, "BF16_Optimizer") | never("a part of DeepSpeed's engine without a counterpart", "print_rank_0"),
    ),
    "deepspeed.runtime.fp16": Module("The engine's optimizer in 16 bits without ZeRO."),
    "deepspeed.runtime.fp16.fused_optimizer": Module(
        "The engine's optimizer in 16 bits without ZeRO.", yes(_WRAPPERS, "FP16_Optimizer")
    ),
    "deepspeed.runtime.fp16.loss_scaler": Module(
        "Loss scales.",
        yes(
            "polyaccel_deepspeed.engine.loss_scalers",
            "CreateLossScaler",
            "DynamicLossScaler",
            "LossScaler",
            "LossScalerBase",
            "to_python_float",
            *("INITIAL_LOSS_SCALE", "SCALE_WINDOW", "DELAYED_SHIFT", "CONSECUTIVE_HYSTERESIS", "MIN_LOSS_SCALE"),
        )
        | never(
            "DeepSpeed's reading of the section fp16", "LossScaleConfig", "LossScaleProfile", "LossScaleProfileDefaults"
        ),
    ),
    "deepspeed.runtime.fp16.unfused_optimizer": Module(
        "The engine's optimizer in 16 bits without ZeRO.", yes(_WRAPPERS, "FP16_UnfusedOptimizer")
    ),
    "deepspeed.utils.module_utils": Module("Attributes by dotted names.", _HELPERS),
}
