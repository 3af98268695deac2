"""Keys that DeepSpeed has removed are refused with their feature, and dropped where they are off."""

from __future__ import annotations

from typing import Any

import pytest
from polyaccel_deepspeed.config import normalise
from polyaccel_deepspeed.refused_keys import REFUSED_OPTIMIZERS, REMOVED

from polyaccel.config import load_config
from polyaccel.errors import ConfigError

BASE = {"gradient_clipping": 0.0}
BOTH = {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}
"""With it `quantize_training` is refused; alone it is translated."""


def _tree(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return BASE | dict(value)


def _problems(config: dict[str, Any]) -> list[tuple[str, Any]]:
    with pytest.raises(ConfigError) as caught:
        normalise(BASE | config)
    assert all(problem.hint for problem in caught.value.problems)
    return [(problem.key, problem.value) for problem in caught.value.problems]


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_or_dropped_and_polyaccel_has_none(key: str) -> None:
    is_translated = key == "quantize_training"
    left = {"enabled": True} if is_translated else {"a": 1}
    assert _problems(_tree(key, left) | (BOTH if is_translated else {})) == [(key, left)]
    for off in ({}, False, {"enabled": False, "a": 1}):
        tree, (change,) = normalise(_tree(key, off))
        assert change.key == key
        assert load_config(tree) == load_config({})
    with pytest.raises(ConfigError):
        load_config(_tree(key, {}))


@pytest.mark.parametrize("kind", [*REFUSED_OPTIMIZERS, "OneBitAdam"])
def test_optimizers_of_deepspeed_alone_are_refused(kind: str) -> None:
    assert _problems({"optimizer": {"type": kind}}) == [("optimizer.type", kind)]


def test_all_problems_are_listed() -> None:
    assert [key for key, _ in _problems({"amp": {"enabled": True, "opt_level": "O3"}, "fp16": {"loss_scal": 1}})] == [
        "amp",
        "fp16.loss_scal",
    ]
