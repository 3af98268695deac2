"""Parameters of tests that run at several ZeRO stages."""

from __future__ import annotations

from typing import Any

import pytest
from parity_models import SMALL, Config, make_config

stages = pytest.mark.parametrize("stage", [0, 1, 2])
both_backwards = pytest.mark.parametrize("own_backward", [True, False], ids=["engine.backward", "loss.backward"])
SHARDED = {**SMALL, "stage3_param_persistence_threshold": 20}
STAGES = {
    "stage 0": (0, SMALL),
    "stage 1": (1, SMALL),
    "stage 2": (2, SMALL),
    "stage 2, states on the host": (2, {**SMALL, "offload_optimizer": {"device": "cpu"}}),
    "stage 3": (3, SHARDED),
}
"""Stage and section of ZeRO by name, with buckets so small that few parameters share one."""


def config_at(stage: str | int, **changes: Any) -> Config:
    """Return the config of a stage, by its name or number."""
    number, zero = STAGES[stage if isinstance(stage, str) else f"stage {stage}"]
    return make_config(number, zero=zero, **changes)
