"""`polyaccel config check` and `polyaccel config schema`, through their own parser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyaccel.cli.config import add_parser
from polyaccel.config import Config
from polyaccel.config.auto import RULES
from polyaccel.config.keys import walk_keys
from polyaccel.errors import PolyaccelError


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["config", *arguments])
    return int(args.func(args))


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_check_prints_the_batch_sizes_and_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"train_batch_size": 12, "zero_optimization": {"stage": 2}, "optimizer": {"type": "adamw"}, /* [b] */}'
    assert _run("check", _write(tmp_path / "a.json", text), "--world-size", "3") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-4:] == ["valid", "for", "3", "ranks"]
    settings = {line[0]: line[1] for line in lines[2:]}
    assert settings["train_micro_batch_size_per_gpu"] == "4"
    assert settings["zero_optimization.stage"] == "2"
    assert settings["optimizer.params.lr"] == "0.001"
    assert "gradient_clipping" not in settings


def test_check_takes_the_world_size_from_three_batch_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}'
    assert _run("check", _write(tmp_path / "a.json", text)) == 0
    assert "valid for 2 ranks" in capsys.readouterr().out


def test_check_lists_all_problems_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "a.json", '{"train_batch_size": 3, "zero_optimisation": {}, "fp16": {"enabled": 1}}')
    assert _run("check", path, "--world-size", "2") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{path}: 3 problems")
    for part in ("zero_optimisation = {}", "fp16.enabled = 1", "train_batch_size = 3"):
        assert part in captured.err


WARMUP = {"warmup_num_steps": 11, "total_num_steps": 10}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"optimizer": {"type": "AdamX"}}, 'optimizer.type = "AdamX": no optimizer has this name'),
        ({"scheduler": {"type": "Warmup"}}, 'scheduler.type = "Warmup": no scheduler has this name'),
        ({"accelerator": "cudaa"}, "accelerator = \"cudaa\": no accelerator plugin is called 'cudaa'"),
        ({"comm": {"backend": "gluu"}}, "no comm backend plugin is called 'gluu'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "FILE/x"}}}, "is not a directory"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": WARMUP}}, "is longer than the whole schedule"),
    ],
)
def test_check_refuses_what_training_could_not_start_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], told: str
) -> None:
    (tmp_path / "file").touch()
    text = json.dumps({"train_batch_size": 1, **config}).replace("FILE", str(tmp_path / "file"))
    assert _run("check", _write(tmp_path / "a.json", text)) == 1
    assert told in capsys.readouterr().err


def test_check_takes_classes_and_devices_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "RMSprop"},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2}},
        "accelerator": "mtia",
        "comm": {"backend": "gloo"},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "new" / "folder")}},
    }
    assert _run("check", _write(tmp_path / "a.json", json.dumps(config))) == 0, capsys.readouterr().err


def test_check_of_a_missing_file_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("check", "no/such/file.json") == 1
    assert capsys.readouterr().err == "no/such/file.json: no such file\n"


FLAGS = ["--stage", "3", "--bf16", "--offload", "--clip", "1", "--batch", "64", "--run-dir", "runs/a"]


@pytest.mark.parametrize("flags", [FLAGS, ["--stage", "1", "--fp16", "--tensor", "2"], ["--offload", "nvme"]])
def test_new_writes_what_check_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run("new", *flags, "made.json") == 0
    assert _run("check", "made.json", "--ranks", "2") == 0, capsys.readouterr().err
    made = json.loads(Path("made.json").read_text())
    if flags is FLAGS:
        assert made["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        assert (made["bf16"]["enabled"], made["train_batch_size"], made["run_dir"]) == (True, 64, "runs/a")
    with pytest.raises(PolyaccelError):
        _run("new", *flags, "made.json")
    assert _run("new", *flags, "made.json", "--force") == 0


def test_new_asks_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["3", "fp32", "nvme", "", "1e-4"])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    monkeypatch.chdir(tmp_path)
    assert _run("new") == 0
    made = json.loads(Path("config.json").read_text())
    assert made["zero_optimization"]["stage"] == 3
    assert made["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert (made["train_micro_batch_size_per_gpu"], made["optimizer"]["params"]["lr"]) == (8, 1e-4)
    assert "bf16" not in made


def test_values_in_messages_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "a.json", '{"train_batch_size": true, "optimizer": {"type": null, "parms": {"a": false}}}')
    assert _run("check", path) == 1
    error = capsys.readouterr().err
    assert "train_batch_size = true: " in error
    assert '{"a": false}' in error


def test_schema_documents_every_key_and_says_where_auto_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    allows_auto = set()
    for key in walk_keys(Config):
        owner = schema if key.model is Config else schema["$defs"][key.model.__name__]
        entry = owner["properties"][key.field.alias or key.name]
        if "$ref" in entry:  # pydantic leaves a description out that equals the section's own
            entry = schema["$defs"][entry["$ref"].rpartition("/")[2]] | entry
        assert entry["description"] == key.field.description, key.dotted
        if {"const": "auto"} in entry.get("anyOf", []):
            allows_auto.add(key.dotted)
    assert allows_auto == {key for key in RULES if ".params." not in key}
