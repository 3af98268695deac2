"""What a config allows to be tried, and what a trial's config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyaccel.config import ResolvedConfig, load_config
from polyaccel.config.resolve import resolve_config
from polyaccel.errors import ConfigError
from polyaccel.job.trial_env import deep_merge
from polyaccel.planner.autotune.candidates import candidates, own_candidate, quiet_changes

TREE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 1},
}


def config(ranks: int = 2, **section: Any) -> ResolvedConfig:
    return resolve_config(load_config({**TREE, "autotuning": section}), world_size=ranks)


def test_samples_of_a_step_stay_and_the_config_itself_is_first() -> None:
    resolved = config()
    found = candidates(resolved, 2, is_remote=False)
    assert found[0] == own_candidate(resolved)
    assert {each.micro_batch * each.accumulation for each in found} == {8}
    assert {each.micro_batch for each in found} == {1, 2, 4, 8}
    assert {each.stage for each in found} == {0, 1, 2, 3}
    assert {each.recomputes for each in found} == {False, True}
    assert {each.offload for each in found} == {"none"}
    assert len(found) == len(set(found)) == 4 * 4 * 2


def test_states_leave_a_device_whose_memory_is_its_own() -> None:
    found = candidates(config(), 2, is_remote=True)
    assert {(each.offload, each.offload_param) for each in found if each.stage == 3} == {
        ("none", "none"),
        ("cpu", "none"),
        ("cpu", "cpu"),
    }
    assert {each.offload_param for each in found if each.stage < 3} == {"none"}


def test_the_section_says_what_is_tried() -> None:
    asked: dict[str, Any] = {"stages": [1, 2], "checkpointing": [False], "bucket_sizes": [1000], "tensor": [2]}
    asked |= {
        "min_train_micro_batch_size_per_gpu": 2,
        "max_train_micro_batch_size_per_gpu": 4,
        "offload": ["cpu", "nvme"],
    }
    own, *found = candidates(config(4, **asked), 4, is_remote=False)
    assert own.offload == "none"
    assert {each.stage for each in found} == {1, 2}
    assert {each.micro_batch for each in found} == {2, 4}
    assert {each.offload for each in found} == {"cpu"}, "nvme has no path"
    assert {each.bucket_numel for each in found} == {1000, 500_000_000}
    shared = {(each.tensor, each.micro_batch * each.accumulation) for each in found}
    assert shared == {(1, 4), (2, 8)}, "two ranks share a batch, so each pair has twice as much of it"


def test_a_trial_s_config_is_the_candidate_s() -> None:
    resolved = config(offload=["cpu"])
    for each in candidates(resolved, 2, is_remote=False)[1::5]:
        tree = {**TREE, "monitors": {"jsonl": {}}, "trace": {"steps": [1, 2]}}
        deep_merge(tree, {**each.changes(16), **quiet_changes(Path("there"))})
        again = resolve_config(load_config(tree), world_size=2)
        assert own_candidate(again) == each
        assert (again.train_batch_size, again.run_dir, again.monitors, again.trace) == (16, "there", {}, None)
        assert each.applied_to(resolved).zero_optimization == again.zero_optimization


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"start_profile_step": 9}, "start_profile_step = 9 behind end_profile_step = 5"),
        ({"min_train_micro_batch_size_per_gpu": 2000}, "= 2000 above the largest, 1024"),
        ({"stages": []}, "names nothing in stages"),
        ({"stages": [4]}, "autotuning.stages"),
        ({"model_info": {"profile": True}}, "autotuning.model_info"),
        ({"max_train_batch_size": 64}, "autotuning.max_train_batch_size"),
    ],
    ids=["steps", "micro-batches", "nothing", "stage", "model", "batch"],
)
def test_a_section_that_cannot_be_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**section)
    assert said in str(error.value)


def test_keys_of_deepspeed_s_tuner_that_change_nothing_are_taken() -> None:
    taken = {
        "enabled": True,
        "fast": False,
        "tuner_type": "model_based",
        "num_tuning_micro_batch_sizes": 5,
        "mp_size": 2,
    }
    assert len(load_config({**TREE, "autotuning": taken}).without_effect) == 3
