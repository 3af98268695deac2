"""A trial as its processes see it: the changes of a config, and what is told of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from polyaccel.config import load_config
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import PolyaccelError
from polyaccel.job.trial_env import CHANGES_FILE, MODEL_FILE, TRIAL_VARIABLE, TrialModel, deep_merge, write_trial_model

TREE = {"train_batch_size": 8, "zero_optimization": {"cpu_offload": True, "stage": 1}, "monitors": {"jsonl": {}}}
CHANGES = {"train_batch_size": 4, "zero_optimization": {"offload_optimizer": {"device": "none"}}, "monitors": None}


def test_every_config_gets_the_trial_s_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CHANGES_FILE).write_text(json.dumps(CHANGES))
    monkeypatch.setenv(TRIAL_VARIABLE, str(tmp_path))
    before = json.dumps(TREE)
    found = load_config(TREE)
    assert found.train_batch_size == 4
    assert found.zero_optimization.stage == 1
    assert found.zero_optimization.offload_optimizer.device == "none"
    assert found.monitors == {}
    assert any("train_batch_size = 8" in sentence and TRIAL_VARIABLE in sentence for sentence in found.without_effect)
    assert json.dumps(TREE) == before
    assert load_config(found) is found
    monkeypatch.delenv(TRIAL_VARIABLE)
    assert load_config(TREE).train_batch_size == 8


def test_a_variable_that_is_left_over_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIAL_VARIABLE, str(tmp_path))
    with pytest.raises(PolyaccelError) as caught:
        load_config(TREE)
    assert caught.value.value == str(tmp_path)
    assert TRIAL_VARIABLE in str(caught.value)


def test_changes_make_tables_and_take_keys_out() -> None:
    tree = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    deep_merge(tree, {"a": {"x": 5}, "b": {"c": None, "d": 6}, "e": None, "absent": None})
    assert tree == {"a": {"x": 5}, "b": {"d": 6}}


def test_a_model_is_told_once_and_read_again(tmp_path: Path) -> None:
    specs = (ParamSpec("b.weight", (3, 4), DType.BFLOAT16), ParamSpec("a", (), DType.FLOAT32, 0, False))
    told = TrialModel(specs, {"b.weight": "b"}, 1000, True, 5000, {"tensor": 2})
    environment = {**os.environ, TRIAL_VARIABLE: str(tmp_path)}
    write_trial_model(environment, lambda: told)
    found = TrialModel.from_json((tmp_path / MODEL_FILE).read_text())
    assert found == told
    assert found.nbytes == 24 + 4
    write_trial_model(environment, lambda: pytest.fail("it has been told"))
    write_trial_model({}, lambda: pytest.fail("nobody asks"))
