"""`polyaccel plan` for a config with stages: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from polyaccel.cli.main import main

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW"},
    "pipeline": {"stages": 2, "schedule": "1f1b"},
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    described = transformers.LlamaConfig(**sizes, num_hidden_layers=3, architectures=["LlamaForCausalLM"])
    described.save_pretrained(tmp_path)
    return tmp_path


def plan(llama: Path, config: dict[str, Any], *more: str) -> int:
    file = llama / "ds.json"
    file.write_text(json.dumps(config))
    return main(["plan", str(file), str(llama), "-n", "4", *more])


def test_every_stage_is_planned_by_the_table(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(llama, CONFIG, "--sequence-length", "64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [stage["blocks"] for stage in found["stages"]] == [["0-1"], ["2-2"]]
    assert [stage["kept"] for stage in found["stages"]] == [2, 1]
    words, last, block = 64 * 32, 64 * 32 + 32, 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert [stage["numel"] for stage in found["stages"]] == [words + 2 * block, block + last]
    peaks = [stage["activations_peak_nbytes"] for stage in found["stages"]]
    one = {**CONFIG, "gradient_accumulation_steps": 1}
    assert plan(llama, one, "--sequence-length", "64", "--json") == 0
    least = [stage["activations_peak_nbytes"] for stage in json.loads(capsys.readouterr().out)["stages"]]
    assert peaks[0] > 1.5 * least[0]  # another micro-batch is kept meanwhile
    assert peaks[1] == least[1]
    assert plan(llama, CONFIG, "--sequence-length", "64", "--limit-device", str(max(peaks))) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "over 2 stages of 2 ranks each; 1f1b, 8 micro-batches, 2 chunks" in said
    assert "that fit on every stage: none" in said


@pytest.mark.parametrize(
    "changes", [{"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}], ids=["tensor", "sequence"]
)
def test_ranks_share_what_a_stage_has(llama: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for each in (CONFIG, CONFIG | changes):
        assert plan(llama, each, "--sequence-length", "64", "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["stages"])
    for alone, shared in zip(*found, strict=True):
        assert shared["blocks"] == alone["blocks"]
        assert 0.4 * alone["activations_peak_nbytes"] < shared["activations_peak_nbytes"]
        assert shared["activations_peak_nbytes"] < 0.85 * alone["activations_peak_nbytes"]
        cut = [own["peak_nbytes"]["device"] for own in shared["settings"] if own["is_own"]]
        whole = [own["peak_nbytes"]["device"] for own in alone["settings"] if own["is_own"]]
        assert (cut < whole) == ("tensor_parallel" in changes)


def test_experts_are_counted_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    described = transformers.MixtralConfig(
        **sizes, num_key_value_heads=2, num_hidden_layers=3, num_local_experts=4, architectures=["MixtralForCausalLM"]
    )
    described.save_pretrained(tmp_path)
    found = []
    for changes in ({}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}):
        assert plan(tmp_path, CONFIG | changes, "--json") == 0
        stages = json.loads(capsys.readouterr().out)["stages"]
        assert [stage["blocks"] for stage in stages] == [["0-1"], ["2-2"]]
        found.append([own["peak_nbytes"]["device"] for stage in stages for own in stage["settings"] if own["is_own"]])
    experts = 2 * 3 * 32 * 64  # elements of a layer that the other rank has
    whole, spread = found
    assert whole[0] - spread[0] >= 2 * experts * 16
    assert whole[1] - spread[1] >= experts * 16
    shared = CONFIG | {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    assert plan(tmp_path, shared, "--sequence-length", "64") == 1
    assert "are not estimated for 2 expert ranks" in capsys.readouterr().err


def test_a_function_makes_a_model_that_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "import torch",
        "def build():",
        "    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))",
        "    model.dummy_inputs = torch.zeros(1, 8)",
        "    return model",
    )
    (tmp_path / "planned_by_a_function.py").write_text("\n".join(lines))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "ds.json", "planned_by_a_function:build", "-n", "2", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["blocks"] for stage in stages] == [["0-2"], ["3-4"]]
    assert [stage["numel"] for stage in stages] == [3 * 72, 2 * 72]


@pytest.mark.parametrize(
    ("changes", "model", "said"),
    [
        ({}, "7e9", "it is unknown along which blocks '7e9' is cut into 2 stages"),
        ({}, "nowhere:build", "nowhere:build cannot be imported"),
        ({"pipeline": {"stages": 2, "partition": "profiled"}}, None, "cannot be dealt before they run"),
        ({"pipeline": {"stages": 4}}, None, "3 layers for 4 parts of a pipeline"),
    ],
    ids=["a number", "no function", "profiled", "too many stages"],
)
def test_what_cannot_be_planned_is_said(
    llama: Path, changes: dict[str, Any], model: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = llama / "ds.json"
    file.write_text(json.dumps(CONFIG | changes))
    assert main(["plan", str(file), model or str(llama), "-n", "4"]) == 1
    assert said in capsys.readouterr().err
