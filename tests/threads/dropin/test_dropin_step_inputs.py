"""`curriculum_learning` and `progressive_layer_drop` as DeepSpeed's documentation writes them, through its names."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn


class Recording(nn.Module):
    """Takes what DeepSpeed's engine gives its model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.given: list[dict[str, Any]] = []

    def forward(self, tokens: torch.Tensor, curriculum_seqlen: int = 0, **named: Any) -> torch.Tensor:
        self.given.append({"curriculum_seqlen": curriculum_seqlen, **named})
        return self.embed(tokens).square().mean()  # type: ignore[no-any-return]


def test_a_model_gets_what_deepspeed_gives() -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 8,
            "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 40000, "difficulty_step": 8},
        },
    }
    model = Recording()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.zeros(2, 4, dtype=torch.int64)))
        engine.step()
    assert [one["curriculum_seqlen"] for one in model.given] == [8, 8]
    assert [one["progressive_layer_drop"] for one in model.given] == [True, True]
    assert model.given[0]["pld_theta"] == 1.0 > model.given[1]["pld_theta"] > 0.999
