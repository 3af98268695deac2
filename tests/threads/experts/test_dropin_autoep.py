"""A config for DeepSpeed's AutoEP with all of its keys trains what plain torch trains."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from transformer_models import trained_by, trained_plainly, transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

SECTION: dict[str, Any] = {
    "enabled": True, "autoep_size": 2, "expert_tensor_parallel_size": 1, "validate_folding_routing": True,
    "async_split_plan": True, "preset_model": "mixtral", "moe_layer_pattern": r"model\.layers\.\d+\.mlp",
    "expert_pattern": "experts", "router_pattern": "gate", "use_grouped_mm": True, "disable_triton_grouped_mm": True,
    "route_norm": True, "route_scale": 1.0, "score_apply": "post", "combine_impl": "weighted_sum",
    "row_weighting_impl": "auto", "gate_up_impl": "fused", "comm_backend": "comm", "comm_num_sm": 8,
    "comm_qp_margin": 2, "comm_max_tokens_per_rank": 64, "num_expert_groups": None, "num_limited_groups": None,
    "score_func": "softmax", "top_k": 2, "load_balance_coeff": None, "routed_scaling_factor": "auto",
    "expert_w1": "gate_up_proj", "expert_w2": "down_proj", "expert_w3": None, "num_experts_attr": "num_local_experts",
    "top_k_attr": "num_experts_per_tok", "has_shared_experts": False, "shared_experts_pattern": None,
    "shared_experts_gate_pattern": None, "expert_activation": "swiglu",
}  # fmt: skip
"""All 36 keys, with what they are for Mixtral."""


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)


def _config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 2},
        "expert_parallel": {**SECTION, **changes},
    }


def test_every_key_of_autoep_is_taken_and_the_losses_are_those_of_plain_torch() -> None:
    assert len(SECTION) == 36
    model = transformer_model("mixtral")
    losses, norms, _ = trained_plainly(model, "mixtral", 2, _adam)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def train(communicator: Communicator) -> tuple[list[float], list[float]]:
        mine = copies[communicator.rank]
        with pytest.raises(ConfigError):
            deepspeed.initialize(model=mine, config=_config(top_k=1))
        engine, *_ = deepspeed.initialize(model=mine, config=_config())
        assert engine.mesh.size_of(("expert",)) == 2
        found = trained_by(engine, "mixtral", communicator.rank)
        engine.destroy()
        return found

    for rank, (found, of_norms) in enumerate(run_threads(2, train)):
        assert found == pytest.approx(losses[rank], rel=1e-5)
        assert of_norms == pytest.approx(norms, rel=1e-4)
