"""Every key whose feature does not exist is refused when it asks for it, and accepted when it asks for nothing.

A tuning key is accepted with any value of its type, and a sentence about it is told."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.config import load_config, resolve_config
from polyaccel.config.unsupported_keys import ABSENT, BELOW, Absent
from polyaccel.errors import ConfigError


def _asking(harmless: Any) -> Any:
    """A value that asks for the feature of a key whose harmless value is `harmless`."""
    if isinstance(harmless, bool):
        return not harmless
    if isinstance(harmless, int | float):
        return harmless + 1
    return {"a": 1} if harmless in (None, {}) else f"{harmless}x"


def _tree(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    if key.startswith("optimizer."):
        value["optimizer"]["type"] = "Lamb"
    return dict(value)


CASES = [
    pytest.param(entry, pattern.removesuffix(BELOW), harmless, id=pattern)
    for entry in ABSENT
    for pattern, harmless in entry.keys.items()
]
FEATURES = [case for case in CASES if not case.values[0].is_tuning]
TUNING = [case for case in CASES if case.values[0].is_tuning]


@pytest.mark.parametrize(("entry", "key", "harmless"), TUNING)
def test_a_tuning_key_is_accepted_and_told(entry: Absent, key: str, harmless: Any) -> None:
    value = 7 if harmless is None else _asking(harmless)
    config = load_config(_tree(key, value))
    assert config.model_dump() == load_config({}).model_dump()
    assert config.without_effect == (f"{key} = {value!r} has no effect: {entry.feature}",)
    assert resolve_config(load_config(_tree(key, value) | {"train_batch_size": 1}), world_size=1).without_effect
    with pytest.raises(ConfigError) as caught:
        load_config(_tree(key, "fast"))
    (problem,) = caught.value.problems
    expected = "true or false" if isinstance(harmless, bool) else "a number"
    assert (problem.key, problem.expected) == (key, f"should be {expected}")


def test_a_misspelt_tuning_key_stays_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"aio": {"queue_deph": 8}})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("aio.queue_deph", 8)]
    assert "'aio.queue_depth'" in str(caught.value)


@pytest.mark.parametrize(("entry", "key", "harmless"), FEATURES)
def test_a_value_that_asks_for_an_absent_feature_is_refused(entry: Absent, key: str, harmless: Any) -> None:
    if entry.switch not in (None, key):
        assert load_config(_tree(key, _asking(harmless))) == load_config({})  # an option of a feature that is off
        return
    with pytest.raises(ConfigError) as caught:
        load_config(_tree(key, _asking(harmless)))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [(key, _asking(harmless))]
    problem = caught.value.problems[0]
    assert problem.expected == f"belongs to {entry.feature}, which polyaccel does not have"
    assert problem.hint


@pytest.mark.parametrize(("entry", "key", "harmless"), CASES)
def test_its_harmless_value_is_accepted(entry: Absent, key: str, harmless: Any) -> None:
    assert load_config(_tree(key, harmless)) == load_config(
        {"optimizer": {"type": "Lamb"}} if key.startswith("optimizer") else {}
    )


SCHEDULE = {"enabled": True, "total_layer_tokens": 9}


def test_a_feature_that_is_asked_for_is_one_problem_whatever_its_options() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"data_efficiency": {"data_routing": {"random_ltd": {"layer_token_lr_schedule": SCHEDULE}}}})
    assert [problem.key for problem in caught.value.problems] == [
        "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled"
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": False, "ratio": 0.5}}},
        {"zero_optimization": {"parameter_alignment": True}},
    ],
)
def test_options_of_what_is_off_are_kept(config: dict[str, Any]) -> None:
    assert load_config(config) != load_config({})


def test_the_caller_s_dict_is_left_alone() -> None:
    config = {"data_efficiency": {"enabled": False, "seed": 5}, "aio": {"queue_depth": 8}}
    load_config(config)
    assert config == {"data_efficiency": {"enabled": False, "seed": 5}, "aio": {"queue_depth": 8}}
