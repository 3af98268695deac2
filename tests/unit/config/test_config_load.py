"""Where configs come from, what older spellings become, and what is left alone."""

from __future__ import annotations

import base64
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from polyaccel.config import Config, load_config, load_resolved
from polyaccel.errors import ConfigError

TEXT = '{\n  "train_batch_size": 8, // all ranks\n  "zero_optimization": {"stage": 2,}, # shard\n}\n'


def test_a_file_may_have_comments_and_trailing_commas(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(TEXT, encoding="utf-8-sig")
    for source in (path, str(path)):
        config = load_config(source)
        assert config.train_batch_size == 8
        assert config.zero_optimization.stage == 2


@pytest.mark.parametrize("encode", [base64.urlsafe_b64encode, base64.b64encode])
@pytest.mark.parametrize("padded", [True, False])
def test_base64_of_json_is_a_source(encode: Any, padded: bool) -> None:
    text = json.dumps({"train_batch_size": 8, "accelerator": "\u00ff\u00fe??>>~~"}, ensure_ascii=False)
    encoded = encode(text.encode()).decode()
    config = load_config(encoded if padded else encoded.rstrip("="))
    assert config.accelerator == "\u00ff\u00fe??>>~~"


def test_base64_longer_than_a_file_name_is_a_source() -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "Mine", "params": {"note": "x" * 9000}}}
    assert load_config(base64.urlsafe_b64encode(json.dumps(config).encode()).decode()).train_batch_size == 8


def test_a_config_is_its_own_source() -> None:
    config = Config(train_batch_size=8)
    assert load_config(config) is config


@pytest.mark.parametrize("source", ["missing.json", "missing", "dir/missing.json", "", "AAAA"])
def test_a_missing_file_is_named(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert caught.value.problems[0].value in (source, str(Path(source)))


@pytest.mark.parametrize("source", [3, None, ["a"], 1.5])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert [problem.key for problem in caught.value.problems] == ["config"]
    assert "base64" in str(caught.value)


def test_a_file_that_holds_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("config", [1, 2])]
    assert caught.value.source == str(path)


def test_errors_use_the_name_the_caller_gives() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"nope": 1}, source_name="--deepspeed_config")
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("nope", 1)]
    assert "--deepspeed_config" in str(caught.value)


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("fp16.enabled", False)]


def test_a_key_that_is_no_string_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "fp16": {3: 4}})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("fp16", 3)]


def test_the_callers_dict_is_never_changed() -> None:
    given: dict[str, Any] = {
        "train_batch_size": "auto",
        "bfloat16": {"enabled": True},
        "zero_optimization": {"cpu_offload": False, "prefetch_bucket_size": 50_000_000},
        "optimizer": {"type": "adam", "params": {"lr": "auto", "betas": (0.9, 0.99)}},
    }
    before = copy.deepcopy(given)
    config = load_resolved(given, world_size=2, hints={"train_batch_size": 4, "learning_rate": 0.1})
    assert given == before
    given["optimizer"]["params"]["betas"] = None
    assert config.optimizer is not None
    assert config.optimizer.params["betas"] == (0.9, 0.99)


def test_large_counts_may_be_written_as_floats() -> None:
    config = load_config({"zero_optimization": {"reduce_bucket_size": 2e8, "allgather_bucket_size": 2e8}})
    assert config.zero_optimization.reduce_bucket_size == 200_000_000
    assert type(config.zero_optimization.reduce_bucket_size) is int


def test_both_spellings_of_a_stage_3_key_are_accepted() -> None:
    for name in ("prefetch_bucket_size", "stage3_prefetch_bucket_size"):
        assert load_config({"zero_optimization": {name: 5e7}}).zero_optimization.prefetch_bucket_size == 50_000_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}),
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": False}},
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}},
        ),
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": True}},
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        ),
        (
            {"zero_optimization": {"cpu_offload_param": False, "cpu_offload_use_pin_memory": False}},
            {"zero_optimization": {"offload_param": {"device": "none", "pin_memory": False}}},
        ),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": False}},
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}},
        ),
    ],
)
def test_a_deprecated_key_is_mapped_with_a_warning(
    old: dict[str, Any], new: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "polyaccel.config"):
        assert load_config(old) == load_config(new)
    assert caplog.messages
    assert all("is deprecated; it was read as" in message for message in caplog.messages)


def test_a_deprecated_key_is_checked_like_the_one_that_it_is_read_as() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"stage": 2, "cpu_offload_param": True}})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("zero_optimization.offload_param.device", "cpu")
    ]
    assert "stage 2" in str(caught.value)


def test_a_config_refuses_to_change() -> None:
    config = load_config({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1}}})
    assert config.optimizer is not None
    with pytest.raises(ValidationError):
        config.zero_optimization.stage = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 2
    with pytest.raises(TypeError):
        config.optimizer.params.update(lr=2)
    assert config.optimizer.params == {"lr": 1}
