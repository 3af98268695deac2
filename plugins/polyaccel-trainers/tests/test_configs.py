"""Configs of engines under trainers: keys that the trainer decides, and ranks that would share samples."""

from __future__ import annotations

from typing import Any

import pytest
from polyaccel_trainers.configs import engine_config

from polyaccel.errors import PolyaccelError


@pytest.mark.parametrize(
    "config",
    [
        {"pipeline": {"stages": 2}},
        {"mesh": {"pipe": 2}},
        {"mesh": {"tensor": 2}},
        {"tensor_parallel": {"tp": {"tp_size": 2}}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
    ],
)
def test_ranks_that_share_samples_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(PolyaccelError) as caught:
        engine_config(config, 1, "fp32")
    assert caught.value.value == 2


def test_one_rank_of_each_kind_and_experts_are_taken() -> None:
    config = {"pipeline": {"stages": 1}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    made = engine_config(config, 1, "fp32")
    assert made["expert_parallel"] == config["expert_parallel"]
    assert made["zero_optimization"] == {"stage": 1}
