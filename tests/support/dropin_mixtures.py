"""Layers of experts by DeepSpeed's names, trained on two ranks: `dropin_mixtures.py OUT` writes losses, norms and
counts by case to the file OUT. It runs over DeepSpeed itself and over the drop-in: both are to write the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import has_moe_layers, is_moe_param
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 12
STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "top 1": {"k": 1, "capacity_factor": 1.0, "min_capacity": 2},
    "top 1 in order of nothing dropped": {"k": 1, "drop_tokens": False, "use_rts": False},
    "sample": {"k": 1, "noisy_gate_policy": "RSample", "min_capacity": 1},
    "jitter": {"k": 1, "noisy_gate_policy": "Jitter", "capacity_factor": 1.5},
    "top 2": {"k": 2, "capacity_factor": 0.7, "min_capacity": 1},
    "top 2 without sampling": {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
    "top 3": {"k": 3, "capacity_factor": 0.8, "min_capacity": 1},
    "top 3, nothing dropped": {"k": 3, "drop_tokens": False},
    "residual": {"k": 1, "use_residual": True, "capacity_factor": 1.25},
}
"""Arguments of `MoE`."""


class Model(nn.Module):
    """Two layers of experts between others, on samples of a function."""

    def __init__(self, ep_sizes: tuple[int, int], **settings: Any) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList(
            MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)), 4, size, **settings)
            for size in ep_sizes
        )
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        wanted, x, losses, counts = torch.sin(3 * x).roll(1, dims=-1), self.before(x), [], []
        for mixture in self.mixtures:
            out, loss, count = mixture(x)
            x = x + out
            losses.append(loss)
            counts.append(count)
        return functional.mse_loss(self.after(x), wanted) + 0.05 * sum(losses), counts


def built(case: str, ep_sizes: tuple[int, int]) -> Model:
    torch.manual_seed(2)
    return Model(ep_sizes, **CASES[case])


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }


def trained(case: str, ep_size: int, stage: int) -> dict[str, Any]:
    """This rank's losses, norms and tokens an expert by step."""
    model = built(case, (ep_size, ep_size))
    assert has_moe_layers(model) == (True, 4)
    assert {is_moe_param(one) for one in model.mixtures.parameters()} == {True, False}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config_of(stage))
    assert engine.has_moe_layers
    assert engine.num_experts == [4, 4]
    rank = deepspeed.comm.get_rank()
    if ep_size > 1:
        name = groups._get_max_expert_size_name()
        assert name == f"ep_size_{ep_size}"
        assert torch.distributed.get_world_size(groups._get_expert_parallel_group(name)) == ep_size
        assert torch.distributed.get_world_size(groups._get_expert_data_parallel_group(name)) == 1
        assert groups._get_expert_parallel_rank(name) == rank
        assert tuple(groups._get_expert_parallel_group_ranks(name)) == (0, 1)
    found: dict[str, Any] = {"losses": [], "norms": [], "counts": []}
    for step in range(STEPS):
        torch.manual_seed(1000 * step + rank)
        loss, counts = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        found["losses"].append(loss.item())
        found["norms"].append(float(engine.get_global_grad_norm() or 0.0))  # DeepSpeed has none at stage 0
        found["counts"].append([count.tolist() for count in counts])
    engine.eval()
    with torch.no_grad():
        torch.manual_seed(rank)
        found["losses"].append(engine(batch(STEPS, rank))[0].item())
    engine.destroy()
    return found


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for case in CASES:
        for ep_size, stage in ((1, 0), (2, 1), (2, 2)):
            if case not in ("top 1", "top 2") and (ep_size, stage) != (2, 1):
                continue
            here = trained(case, ep_size, stage)
            both: list[Any] = [None, None]
            torch.distributed.all_gather_object(both, here)
            found[f"{case}, ep {ep_size}, stage {stage}"] = both
    if deepspeed.comm.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
