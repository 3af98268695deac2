"""`polyaccel tune` on a real training of two ranks: it finds, it survives a kill, and it goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 1},
    "autotuning": {"stages": [1, 2], "checkpointing": [False], "margin": 10.0, "tuner_early_stopping": 0},
}
SCRIPT = """
import torch, polyaccel
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
engine, *_ = polyaccel.initialize(model=torch.nn.Sequential(*layers), config="ds.json")
while True:
    engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 64)).square().mean())
    engine.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, trials: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "polyaccel", "tune", "--trials", str(trials), "ds.json", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_script_is_tuned_as_it_is_and_a_kill_loses_no_trial(folder: Path) -> None:
    process = start(folder, 9, "--nproc", "2", "train.py")
    assert process.stdout is not None
    line = ""
    for line in process.stdout:
        if line.startswith("trial 1: "):
            break
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    assert "s a step" in line
    process = start(folder, 3, "--nproc", "2", "train.py")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "1 trials of before count" in said
    assert "trial 1:" not in said
    assert "trial 3: " in said
    results = folder / "autotuning_results"
    header, *trials = (json.loads(text) for text in (results / "trials.jsonl").read_text().splitlines())
    assert list(header) == ["key"]
    assert len({json.dumps(trial["candidate"]) for trial in trials}) == len(trials) == 3
    assert all(trial["step_s"] > 0 and trial["peak_nbytes"] > 0 for trial in trials)
    model = json.loads((results / "model.json").read_text())
    assert sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for _, shape, *_ in model["parameters"]) == 4 * 65 * 64
    best = json.loads((results / "best.json").read_text())
    fastest = min(trials, key=lambda trial: trial["step_s"])["candidate"]
    assert best["zero_optimization"]["stage"] == fastest["stage"]
    assert best["train_batch_size"] == 8
    assert (results / "front.svg").read_text().startswith("<svg")
    assert json.loads((results / "comm.json").read_text())["world_size"] == 2
    assert json.loads((results / "rates.json").read_text())["update_device_s"] > 0


def test_a_script_that_fails_is_told_with_its_last_words(folder: Path) -> None:
    (folder / "train.py").write_text("raise SystemExit('no data here')")
    process = start(folder, 2, "--nproc", "1", "train.py")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "could be tried: it ended with code 1 after 0 steps" in said
    assert "no data here" in said
