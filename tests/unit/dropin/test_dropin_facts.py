"""The drop-in's tables against DeepSpeed 0.19.8 itself: its names, arguments and config keys stand in
`deepspeed_facts.json`, which `docs/generate/deepspeed_facts.py` makes in an environment that has it."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import deepspeed
import pytest
from deepspeed.accelerator import DeepSpeedAccelerator
from polyaccel_deepspeed import refused_keys
from polyaccel_deepspeed.engine.attributes import ABSENT_ATTRIBUTES
from polyaccel_deepspeed.keys.answers import ABSENT_FEATURES, Outcome, answer_to, answers
from polyaccel_deepspeed.launcher import options_parser
from polyaccel_deepspeed.names.entry import Status
from polyaccel_deepspeed.names.internals import MEMBERS_ABSENT
from polyaccel_deepspeed.names.packages import ABSENT_MODULES, absent_module
from polyaccel_deepspeed.names.surface import MODULES
from polyaccel_deepspeed.to_come import TO_COME
from polyaccel_deepspeed.version import __version__

from polyaccel.config import load_resolved
from polyaccel.config.unsupported_keys import DROP_IN_KEYS

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "generate"))
from deepspeed_facts import arguments

FACTS = json.loads(Path(__file__).with_name("deepspeed_facts.json").read_text(encoding="utf-8"))
OURS = {
    "deepspeed.DeepSpeedEngine": deepspeed.DeepSpeedEngine,
    "deepspeed.accelerator.DeepSpeedAccelerator": DeepSpeedAccelerator,
}
MADE_ELSEWHERE = {
    "DeepSpeedEngine": "initialize makes it",
    "DeepSpeedHybridEngine": "initialize makes it",
    "PipelineEngine": "initialize makes it",
    "InferenceEngine": "init_inference makes it",
    "DeepSpeedZeroOptimizer": "initialize makes it",
    "DeepSpeedZeroOptimizer_Stage3": "initialize makes it",
    "BF16_Optimizer": "initialize makes it",
    "FP16_Optimizer": "initialize makes it",
    "FP16_UnfusedOptimizer": "initialize makes it",
    "DeepSpeedAccelerator": "get_accelerator makes it",
    "DeepSpeedConfigError": "polyaccel raises it",
    "ProcessGroup": "torch's; new_group makes it",
    "P2POp": "torch's",
    "OpBuilder": "makes nothing",
}
"""Classes whose constructors are nobody's to call with DeepSpeed's arguments."""
OTHER_DEFAULTS = {
    "debug": "names the caller",
    "timeout": "the config's",
    "tensor_overrides": "a value of DeepSpeed's own",
}
OTHER_NAMES = {
    "cpu_offload": True,
    "cpu_offload_param": True,
    "cpu_offload_use_pin_memory": True,
    "gather_16bit_weights_on_model_save": True,
    "max_live_parameters": 5,
    "max_reuse_distance": 5,
    "model_persistence_threshold": 5,
    "module_granularity_threshold": 0,
    "param_persistence_threshold": 5,
    "prefetch_bucket_size": 5,
    "stage3_gather_fp16_weights_on_model_save": True,
}
"""Keys of `zero_optimization` by names that are older, or without their `stage3_`; and values for them."""
REMOVED = (
    "deepspeed.compression",
    "deepspeed.elasticity",
    "deepspeed.ops.sparse_attention",
    "deepspeed.runtime.zero.mics",
)
"""Modules that DeepSpeed has removed since 0.19.5, and that there are here."""
UNLISTED = ("deepspeed.module_inject", "deepspeed.runtime.data_pipeline")
"""Modules whose names the facts do not list; tests/threads/{tensor_parallel,dropin} use those that there are."""
SHARED = FACTS["source_modules"] | FACTS["modules"]
SET_BY_INITIALIZE = ("config", "lr_scheduler", "monitor", "mpu", "optimizer", "training_dataloader")
"""Attributes that an engine has, and its class has not."""
THERE = [
    (module, name)
    for module, entry in MODULES.items()
    for name, one in entry.names.items()
    if one.status is Status.YES and SHARED.get(module, {}).get(name) and name not in MADE_ELSEWHERE
]


def accepts(ours: str, theirs: str) -> bool:
    """Whether a call that means something to `theirs` means the same to `ours`: its parameters, in their order, with
    their names and defaults, then others that may be left out."""
    mine, wanted = ours.split(), theirs.split()
    rest = mine[len(wanted) :]
    return (
        len(mine) >= len(wanted) and all(map(_is_same, mine, wanted)) and all("=" in one or "*" in one for one in rest)
    )


def _is_same(ours: str, theirs: str) -> bool:
    (name, equals, default), (other, _, asked) = ours.partition("="), theirs.partition("=")
    if ours.startswith("*") or theirs.startswith("*"):
        return ours.count("*") == theirs.count("*")
    free = name in OTHER_DEFAULTS or "..." in (default, asked)
    return name == other and (default == asked or not asked or (free and bool(equals)))


def test_they_are_the_facts_of_the_version_that_we_name() -> None:
    assert __version__.partition("+")[0] == FACTS["version"]


def test_every_public_name_has_its_row() -> None:
    for module, names in SHARED.items():
        if module in MODULES:
            assert sorted(names.keys() - MODULES[module].names.keys()) == []


DATA = [
    *("__compatible_ops__", "accelerator_name", "color_len", "comms_logger", "git_branch", "git_hash"),
    *("installed_ops", "okay", "torch_info", "version", "warning"),
]
"""Names of values, of which the facts have none. Constants in capitals are others; `MiCS_Init` is gone since 0.19.5."""


def test_every_row_is_a_name_of_deepspeeds() -> None:
    shared = {name for names in SHARED.values() for name in names}
    there = [entry for module, entry in MODULES.items() if not module.startswith((*REMOVED, *UNLISTED))]
    found = [name for entry in there for name in entry.names if name not in shared]
    assert [name for name in found if not name.isupper() and name not in (*DATA, "MiCS_Init")] == []


def test_every_attribute_of_the_engine_is_there_or_says_why_not() -> None:
    plain = deepspeed.DeepSpeedEngine
    wanted = [name for name in FACTS["engine_attributes"] if name not in ABSENT_ATTRIBUTES]
    assert [name for name in wanted if not hasattr(plain, name) and name not in SET_BY_INITIALIZE] == []
    assert [name for name in ABSENT_ATTRIBUTES if name not in FACTS["engine_attributes"] or hasattr(plain, name)] == []


def every_answer() -> Iterator[tuple[str, str, str]]:
    """What there is an answer to, with the answer and its reason."""
    known = answers()
    for key in FACTS["keys"]:
        answer = answer_to(key, known)
        yield key, *(("none", "") if answer is None else (answer.outcome.value, answer.why))
    names = {f"{module}.{name}": one for module, entry in MODULES.items() for name, one in entry.names.items()}
    members = {f"{owner}.{name}": one for owner, found in MEMBERS_ABSENT.items() for name, one in found.items()}
    for name, one in (names | members | ABSENT_MODULES).items():
        yield name, one.status.value, one.why
    for name, why in ABSENT_ATTRIBUTES.items():
        yield f"engine.{name}", "no", why


def test_every_answer_is_works_or_has_a_reason_that_stays() -> None:
    """There are three answers, none of which is "later", and every reason of `to_come` is that of an answer."""
    found = [*every_answer()]
    assert {outcome for _, outcome, _ in found} <= {"yes", "accepted", "no"}
    assert [name for name, outcome, why in found if outcome != "yes" and not why] == []
    assert set(TO_COME) <= {why for _, outcome, why in found if outcome == "no"}
    assert [(name, why) for name, outcome, why in found if re.search(r"issue|not exist|\byet\b|\blater\b", why)] == []


def test_what_is_there_takes_deepspeeds_arguments() -> None:
    pairs = {
        f"{module}.{name}": (arguments(getattr(import_module(module), name)), SHARED[module][name])
        for module, name in THERE
    }
    assert len(pairs) > 100
    assert {path: pair for path, pair in pairs.items() if not accepts(*pair)} == {}


@pytest.mark.parametrize(
    ("ours", "theirs"), [("a", "a b=1"), ("b a", "a b"), ("a=2", "a=1"), ("a b", "a"), ("a", "a *args"), ("a", "a=1")]
)
def test_other_arguments_are_seen(ours: str, theirs: str) -> None:
    assert not accepts(ours, theirs)


@pytest.mark.parametrize("owner", sorted(OURS))
def test_members_take_deepspeeds_arguments_or_say_why_they_are_not_there(owner: str) -> None:
    absent, ours = MEMBERS_ABSENT[owner], OURS[owner]
    members = FACTS["members"][owner]
    assert sorted(name for name in members if name not in absent and not hasattr(ours, name)) == []
    assert sorted(name for name in absent if name not in members or hasattr(ours, name)) == []
    found = {name: arguments(inspect.getattr_static(ours, name)) for name in members if name not in absent}
    assert {name: (mine, members[name]) for name, mine in found.items() if not accepts(mine, members[name])} == {}


def test_every_config_key_works_or_says_for_good_why_not() -> None:
    known = answers()
    found = {key: answer_to(key, known) for key in FACTS["keys"]}
    assert [key for key, answer in found.items() if answer is None] == []
    assert [key for key in ABSENT_FEATURES if not any(one.startswith(key) for one in FACTS["keys"])] == []
    assert [
        key for key, answer in found.items() if answer and answer.outcome is not Outcome.WORKS and not answer.why
    ] == []
    assert sorted(DROP_IN_KEYS) == sorted(refused_keys.REMOVED)


def test_constants_have_deepspeeds_values() -> None:
    for module, wanted in FACTS["constants"].items():
        assert {name: getattr(import_module(module), name) for name in wanted} == wanted


def test_every_module_can_be_imported_or_says_why_not() -> None:
    assert [name for name in FACTS["every_module"] if name not in MODULES and absent_module(name) is None] == []
    assert [name for name in ABSENT_MODULES if not any(one.startswith(name) for one in FACTS["every_module"])] == []


def test_every_option_of_the_launcher_is_taken() -> None:
    taken = options_parser()._option_string_actions
    assert [option for option in FACTS["options"] if option not in taken] == []


def test_every_command_is_installed() -> None:
    text = (Path(deepspeed.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    commands = {
        line.partition(" = ")[0].strip('"') for line in text.splitlines() if "polyaccel_deepspeed.commands:" in line
    }
    assert [name for name in FACTS["scripts"] if name not in commands] == []


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_key_by_its_other_name_is_read(name: str) -> None:
    load_resolved({"train_batch_size": 1, "zero_optimization": {"stage": 3, name: OTHER_NAMES[name]}}, world_size=1)
