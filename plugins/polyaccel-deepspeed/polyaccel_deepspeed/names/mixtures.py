"""The names of DeepSpeed's mixtures of experts: modules below `deepspeed.moe`."""

from __future__ import annotations

from polyaccel_deepspeed.names.entry import Module, never, yes

_GATES = "polyaccel_deepspeed.experts.gates"
_LAYER = "polyaccel_deepspeed.experts.layer"
_MODELS = "polyaccel_deepspeed.experts.models"

MIXTURES: dict[str, Module] = {
    "deepspeed.moe": Module("Mixtures of experts."),
    "deepspeed.moe.experts": Module("Experts of a layer.", yes(_LAYER, "Experts")),
    "deepspeed.moe.layer": Module("The layer.", yes(_LAYER, "MoE")),
    "deepspeed.moe.mappings": Module(
        "Tokens that tensor ranks share.", yes("polyaccel_deepspeed.experts.mappings", "drop_tokens", "gather_tokens")
    ),
    "deepspeed.moe.sharded_moe": Module(
        "Gates, and what they are part of.",
        yes(
            _GATES,
            "TopKGate",
            "gumbel_rsample",
            "multiplicative_jitter",
            "top1gating",
            "top2gating",
            "topkgating",
        )
        | yes(_LAYER, "MOELayer")
        | never("torch.einsum", "einsum"),
    ),
    "deepspeed.moe.utils": Module(
        "Parameters of experts.",
        yes(
            _MODELS,
            "configure_moe_param_groups",
            "has_moe_layers",
            "is_moe_param",
            "is_moe_param_group",
            "split_params_grads_into_shared_and_expert_params",
            "split_params_into_different_moe_groups_for_optimizer",
            "split_params_into_shared_and_expert_params",
        ),
    ),
}
