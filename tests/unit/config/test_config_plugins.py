"""Keys that name plugins: the names are checked when a config is resolved, and options have one form."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.config import load_config, load_resolved
from polyaccel.errors import ConfigError

OK = {"train_batch_size": 1}


@pytest.mark.parametrize(
    ("config", "key", "told"),
    [
        ({"checkpoint": {"storage": "fil"}}, "checkpoint.storage", "did you mean 'file'?"),
        ({"checkpoint": {"storage": {"fil": {}}}}, "checkpoint.storage", "no storage plugin is called 'fil'"),
        ({"monitors": {"jsonk": {}}}, "monitors.jsonk", "did you mean 'jsonl'?"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvmee"}}},
            "zero_optimization.offload_optimizer.device",
            "did you mean 'nvme'?",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}},
            "zero_optimization.offload_param.device",
            "installed: device (polyaccel",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "tier_options": {"a": 1}}}},
            "zero_optimization.offload_optimizer.tier_options",
            "are for a plugin, and device is 'cpu'",
        ),
        ({"checkpoint": {"storage": {}}}, "checkpoint.storage", "at least 1"),
        ({"monitors": {"jsonl": True}}, "monitors.jsonl", "should be an object"),
    ],
)
def test_a_name_that_nothing_installed_has_is_refused(config: dict[str, Any], key: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_resolved(OK | config, world_size=1)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert told in str(caught.value)


def test_a_storage_is_a_name_or_a_name_with_options() -> None:
    assert load_config({}).checkpoint.storage_plugin == ("file", {})
    assert load_config({"checkpoint": {"storage": "file"}}).checkpoint.storage_plugin == ("file", {})
    named = load_config({"checkpoint": {"storage": {"vault": {"shelf": "top"}}}})
    assert named.checkpoint.storage_plugin == ("vault", {"shelf": "top"})
    with pytest.raises(TypeError):
        named.checkpoint.storage_plugin[1]["shelf"] = "bottom"
    assert named.checkpoint.storage_plugin[1] == {"shelf": "top"}
