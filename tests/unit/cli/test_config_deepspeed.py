"""`polyaccel config check --deepspeed` shows what the drop-in trains with."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from polyaccel_deepspeed.config import read_for_check

from polyaccel.cli import config as verb
from polyaccel.cli.main import main

CONFIG = {
    "_comment": "mine",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": "auto"},
}


@pytest.fixture
def reader(monkeypatch):
    """The drop-in's entry point, as its distribution registers it."""
    point = SimpleNamespace(name="deepspeed", load=lambda: read_for_check)
    monkeypatch.setattr(verb, "metadata", SimpleNamespace(entry_points=lambda group: [point]))


def test_it_shows_what_the_drop_in_reads(tmp_path, capsys, reader):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    arguments = ["--set", "learning_rate=0.002", "--set", "per_device_train_batch_size=4", "--set", "bf16=true"]
    assert main(["config", "check", str(path), "--deepspeed", "--world-size", "2", *arguments]) == 0
    shown = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.strip()}
    wanted = {
        "train_batch_size": "8",
        "optimizer.params.lr": "0.002",
        "bf16.enabled": "true",
        "gradient_clipping": "1.0",
    }
    assert {key: shown[key] for key in wanted} == wanted


def test_it_refuses_what_deepspeed_removed(tmp_path, capsys, reader):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**CONFIG, "train_batch_size": 4, "graph_harvesting": True}))
    assert main(["config", "check", str(path), "--deepspeed"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"{path}: 1 problem")
    assert "graph_harvesting" in shown


def test_without_the_drop_in_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verb, "metadata", SimpleNamespace(entry_points=lambda group: []))
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    assert main(["config", "check", str(path), "--deepspeed"]) == 1
    assert "pip install" in capsys.readouterr().err


def test_a_setting_without_a_value_is_refused(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 2}))
    assert main(["config", "check", str(path), "--set", "learning_rate"]) == 1
    assert "NAME=VALUE" in capsys.readouterr().err
