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
    ("changes", "model", "said"),
    [
        ({}, "7e9", "nothing says along which blocks '7e9' is cut into 2 stages"),
        ({"sequence_parallel_size": 2}, None, "is not planned where ranks stand along sequence"),
        ({"pipeline": {"stages": 2, "partition": "measured"}}, None, "cannot be dealt before they run"),
        ({"pipeline": {"stages": 4}}, None, "3 layers for 4 parts of a pipeline"),
    ],
    ids=["a number", "sequence ranks", "measured", "too many stages"],
)
def test_what_cannot_be_planned_is_said(
    llama: Path, changes: dict[str, Any], model: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = llama / "ds.json"
    file.write_text(json.dumps(CONFIG | changes))
    assert main(["plan", str(file), model or str(llama), "-n", "4"]) == 1
    assert said in capsys.readouterr().err
