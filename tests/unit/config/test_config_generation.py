"""The section `hybrid_engine`: what counts, what has no effect, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.config import load_config
from polyaccel.engine.policies.generation import GenerationPolicy, generation_policy_of
from polyaccel.errors import ConfigError

OPTIONS = {"max_out_tokens": 64, "pin_parameters": False, "release_inference_cache": True}


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, GenerationPolicy()),
        ({"hybrid_engine": OPTIONS}, GenerationPolicy()),
        ({"hybrid_engine": {"enabled": True}}, GenerationPolicy(max_tokens=512)),
        (
            {"hybrid_engine": {"enabled": True, **OPTIONS}},
            GenerationPolicy(max_tokens=64, gathers_once=False, empties_cache=True),
        ),
        ({"zero_optimization": {"stage3_max_live_parameters": 9}}, GenerationPolicy(most_numel=9)),
    ],
)
def test_its_keys_count_where_it_is_enabled(config: dict[str, Any], policy: GenerationPolicy) -> None:
    assert generation_policy_of(load_config(config)) == policy


def test_keys_of_other_implementations_have_no_effect() -> None:
    keys = {"tp_gather_partition_size": 4, "enable_cuda_graph": True}
    config = load_config({"hybrid_engine": {"enabled": True, **keys}})
    assert len(config.without_effect) == len(keys)
    for key, sentence in zip(keys, config.without_effect, strict=True):
        assert sentence.startswith(f"hybrid_engine.{key} = ")


@pytest.mark.parametrize(
    ("size", "mesh", "is_right"), [(1, 1, True), (1, 2, True), (2, 2, True), (2, 1, False), (4, 2, False)]
)
def test_tensor_ranks_are_those_of_training(size: int, mesh: int, is_right: bool) -> None:
    config = {"hybrid_engine": {"enabled": True, "inference_tp_size": size}, "mesh": {"tensor": mesh}}
    if is_right:
        load_config(config)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert [problem.key for problem in caught.value.problems] == ["hybrid_engine.inference_tp_size"]
