"""The names of DeepSpeed's layers over tensor ranks, its collectives of several tensors, and its Muon."""

from __future__ import annotations

from polyaccel_deepspeed.names import sets
from polyaccel_deepspeed.names.entry import Module, accepted, never, yes

_LAYERS = "polyaccel_deepspeed.layers"
_SUMS = "polyaccel_deepspeed.coalesced"
_CUT = "a layer that AutoTP puts in place of a model's; tensor_parallel in the config cuts the model's own"
_REST = (
    "AsyncColumnParallel ColumnParallel Conv_LinearALlreduce EmbeddingLayer FusedModuleWrapper "
    "GateUpPack_LinearLayer GatherFromTensorParallelRegion GatherReplacedLayerParams "
    "HiddenParallelEmbedding LmHeadLinearAllreduce Normalize OPTEmbedding RMSNormalize RowParallel "
    "ScatterToTensorParallelRegion SubParamColumnParallel SubParamLinearAllreduce SubParamLinearLayer "
    "TensorParallelConv2d TensorParallelIcShardConv2d TensorParallelOcShardConv2d TensorParallel_Layer "
    "VocabParallelEmbedding VocabParallelLinear Yuan_LinearAllreduce Yuan_LinearLayer add_bias "
    "collect_autotp_universal_checkpoint_info configure_tensor_parallel_runtime conv_LinearLayer "
    "fused_LinearLayer get_auto_tp_mode"
)

LAYERS: dict[str, Module] = {
    "deepspeed.module_inject": Module(
        "Models cut over ranks.", yes(sets.TENSORS, "set_autotp_mode") | yes(_LAYERS, "LinearAllreduce", "LinearLayer")
    ),
    "deepspeed.module_inject.layers": Module(
        "Layers over ranks.",
        yes(sets.TENSORS, "is_autotp_training_mode", "set_autotp_mode")
        | yes(_LAYERS, "LinearAllreduce", "LinearAllreduceWithReplicatedInput", "LinearLayer")
        | never(_CUT, *_REST.split()),
    ),
    "deepspeed.runtime.comm": Module("Collectives."),
    "deepspeed.runtime.comm.coalesced_collectives": Module(
        "Means of several tensors at once.",
        yes(_SUMS, "reduce_scatter_coalesced")
        | accepted(
            "means are exact: nothing is quantised on the way",
            _SUMS,
            "all_to_all_quant_reduce",
        ),
    ),
    "deepspeed.runtime.zero.muon": Module("Muon."),
    "deepspeed.runtime.zero.muon.muon_optimizer": Module(
        "Muon as an object.", yes("polyaccel_deepspeed.muon", "MuonWithAuxAdam")
    ),
}
