"""Keys of ZeRO++: where they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.config import load_config, resolve_config
from polyaccel.errors import ConfigError

ASKING = {
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
    "zero_quantized_nontrainable_weights": True,
    "zero_quantized_gradients": True,
}


def config_of(stage: int, **keys: Any) -> Any:
    return load_config({"train_batch_size": 12, "zero_optimization": {"stage": stage, **keys}})


@pytest.mark.parametrize(("key", "value"), ASKING.items())
def test_they_are_for_stage_3(key: str, value: Any) -> None:
    for stage in (0, 1, 2):
        with pytest.raises(ConfigError) as caught:
            config_of(stage, **{key: value})
        assert all(part in str(caught.value) for part in ("stage 3", key, str(stage)))
    assert getattr(config_of(3, **{key: value}).zero_optimization, key) == value


def test_near_ranks_divide_all_ranks() -> None:
    config = config_of(3, zero_hpz_partition_size=4)
    assert resolve_config(config, world_size=12).zero_optimization.zero_hpz_partition_size == 4
    with pytest.raises(ConfigError) as caught:
        resolve_config(config, world_size=6)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("zero_optimization.zero_hpz_partition_size", 4)
    ]
