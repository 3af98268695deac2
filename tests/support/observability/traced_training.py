"""What the tests of traces share: a model of three layers, and a config that traces two of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

FIRST, LAST = 2, 3


class ThreeLayers(nn.Module):
    """Its units are `layers.0` to `layers.2`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def traced_config(folder: Path, stage: int = 2, *, profiler: bool = False, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
        "run_dir": str(folder),
        "trace": {"steps": [FIRST, LAST], "profiler": profiler},
        **more,
    }
