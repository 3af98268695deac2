"""Small examples, each run to its end in this process, and ready configs."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest

from polyaccel import comm, load_config

EXAMPLES = Path(__file__).parents[3] / "examples"
FEATURES = sorted(file.stem for file in (EXAMPLES / "by_feature").glob("*.py"))
MOST_LINES = 40


def run(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Run an example as one rank in `folder`."""
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.syspath_prepend(str(script.parent))
    codes: list[object] = []
    monkeypatch.setattr(sys, "exit", codes.append)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        comm.destroy_process_group()
    assert codes in ([], [0])


def last_loss(shown: str) -> float:
    return float(re.findall(r"loss (\S+)", shown)[-1])


@pytest.mark.parametrize("name", FEATURES)
def test_an_example_of_a_feature_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "by_feature" / f"{name}.py"
    assert len(script.read_text().splitlines()) <= MOST_LINES
    run(script, tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    if name == "gradient_accumulation":
        assert "32 micro-batches, 8 optimizer steps" in shown
    elif name != "stop":
        assert "step 8: loss " in shown
        assert math.isfinite(last_loss(shown))
    if name == "metrics":
        assert (tmp_path / "runs" / "by_feature" / "report.html").is_file()


def test_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for steps in (8, 16):
        run(EXAMPLES / "resume" / "train.py", tmp_path, monkeypatch)
        shown = capsys.readouterr().out
        assert f"saved step {steps}: " in shown
        losses.append(last_loss(shown))
    assert losses[1] < losses[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("name", "needs"), [("hf_finetune", "transformers"), ("lora", "peft")])
def test_a_model_of_transformers_trains(
    name: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(needs)
    run(EXAMPLES / name / "train.py", tmp_path, monkeypatch, "--steps", "3", "--out", "trained")
    assert 0 < last_loss(capsys.readouterr().out) < 2 * math.log(256)
    transformers = pytest.importorskip("transformers")
    if name == "lora":
        assert (tmp_path / "trained" / "adapter_model.safetensors").stat().st_size > 1000
        assert pytest.importorskip("peft").PeftConfig.from_pretrained("trained").r == 8
    else:
        _, found = transformers.AutoModelForCausalLM.from_pretrained("trained", output_loading_info=True)
        assert not any(found.values())


@pytest.mark.parametrize("name", ["flax", "linen", "equinox"])
def test_a_module_of_jax_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = "flax" if name == "linen" else name
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run(EXAMPLES / name / "train.py", tmp_path, monkeypatch, "3")
    assert math.isfinite(last_loss(capsys.readouterr().out))


@pytest.mark.parametrize("file", sorted((EXAMPLES / "configs").glob("*.json")), ids=lambda file: str(file.stem))
def test_a_ready_config_is_valid(file: Path) -> None:
    config = load_config(str(file))
    assert config.zero_optimization.stage == json.loads(file.read_text())["zero_optimization"]["stage"]


def test_answers_are_rewarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the rollouts of one engine, whose log-probabilities are those of training in every step."""
    pytest.importorskip("transformers")
    run(EXAMPLES / "rl" / "train.py", tmp_path, monkeypatch, "--steps", "20")
    assert "right answers: " in capsys.readouterr().out
    lines = (tmp_path / "runs" / "rl" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [record for record in map(json.loads, lines) if "tag" in record]
    rewards = [event["value"] for event in events if event["tag"] == "reward"]
    assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5])
    assert {event["value"] for event in events if event["tag"] == "log_probability_difference"} == {0.0}
    assert {"rollout/generate_s", "rollout/hand_over_s", "update_s"} <= {event["tag"] for event in events}


def test_a_student_comes_nearer_to_its_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On its own answers."""
    pytest.importorskip("transformers")
    run(EXAMPLES / "rl" / "distill.py", tmp_path, monkeypatch, "--steps", "30", "--teacher-steps", "60")
    assert "right answers: " in capsys.readouterr().out
    lines = (tmp_path / "runs" / "distill" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [record for record in map(json.loads, lines) if "tag" in record]
    divergences = [event["value"] for event in events if event["tag"] == "reverse_kl"]
    assert sum(divergences[-5:]) < 0.7 * sum(divergences[:5])
