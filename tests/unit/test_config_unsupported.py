"""Every key whose feature does not exist is refused when it asks for it, and accepted when it asks for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.config import Config, load_config
from polyaccel.config.keys import Key, walk_keys
from polyaccel.config.section import Section
from polyaccel.config.unsupported import GAPS, Gap
from polyaccel.errors import ConfigError

KEYS = {key.dotted: key for key in walk_keys(Config)}
ASKING: dict[str, Any] = {  # values that ask for the feature, where the default does not show one
    "optimizer.type": "MuAdamW",
    "zero_optimization.stage": 3,
    "zero_optimization.zenflow": {},
    "seq_parallel_communication_data_type": "bf16",
    "torch_autocast.lower_precision_safe_modules": ["Linear"],
    "data_types.buffer_dtype": "fp16",
    "data_types.keep_in_fp32_modules": [],
    "checkpoint.writer": {},
    "datastates_ckpt": {},
    "activation_checkpointing.number_checkpoints": 4,
    "pipeline.stages": 2,
    "compile.passes": ["z3"],
    "tensor_parallel.vocab_parallel_lm_head": True,
    "tensor_parallel.vocab_parallel_ce_backend": "liger",
    "tensor_parallel.partition_config": {},
    "tensor_parallel.preset_model": "llama",
    "tensor_parallel.injection_policy_tuple": ["a"],
}


def _asking(key: Key) -> Any:
    """A valid value of `key` that is not its default."""
    if key.dotted in ASKING:
        return ASKING[key.dotted]
    default = key.field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default - 1 if default == 2**63 - 1 else default + 1
    if isinstance(default, dict):
        return {"a": 1}
    if isinstance(default, tuple):
        return ["a"]
    assert isinstance(default, str), key.dotted
    return default + "x"


def _leaves(gap: Gap) -> list[Key]:
    """The keys that a gap is about: its own, or all below it when it is a section that is always there."""
    key = KEYS[gap.key]
    if not isinstance(key.field.default, Section):
        return [key]
    below = [child for name, child in KEYS.items() if name.startswith(f"{gap.key}.") and "[]" not in name]
    always = [child for child in below if not isinstance(child.field.default, Section)]
    optional = [child.dotted for child in below if child.is_section and child.field.default is None]
    return [child for child in always if not any(child.dotted.startswith(f"{parent}.") for parent in optional)]


def _tree(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    if key.startswith("optimizer.leg"):
        value["optimizer"]["type"] = "Lamb"
    return dict(value)


CASES = [(gap, key) for gap in GAPS for key in _leaves(gap)]


@pytest.mark.parametrize(("gap", "key"), CASES, ids=[key.dotted for _, key in CASES])
def test_a_value_that_asks_for_a_missing_feature_is_refused(gap: Gap, key: Key) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_tree(key.dotted, _asking(key)))
    assert [problem.key for problem in caught.value.problems] == [key.dotted]
    problem = caught.value.problems[0]
    assert problem.expected == f"{gap.feature} is not available in this version"
    assert problem.cure


@pytest.mark.parametrize("key", [key for _, key in CASES if not key.field.is_required()], ids=lambda key: key.dotted)
def test_its_default_is_accepted(key: Key) -> None:
    default = key.field.get_default(call_default_factory=True)
    written = list(default) if isinstance(default, tuple) else default
    assert load_config(_tree(key.dotted, written)) == load_config(
        {"optimizer": {"type": "Lamb"}} if key.dotted.startswith("optimizer") else {}
    )


@pytest.mark.parametrize(
    "config",
    [
        {"wandb": {"enabled": False, "project": "mine"}},
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": False, "ratio": 0.5}}},
        {"flops_profiler": {"enabled": False, "profile_step": 7}},
        {"zero_optimization": {"parameter_alignment": True}},
    ],
)
def test_options_of_a_feature_that_is_off_ask_for_nothing(config: dict[str, Any]) -> None:
    assert load_config(config) != load_config({})
