"""`polyaccel plan --fit`: which settings fit a device, in which order, and why the next does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from polyaccel.cli.main import main
from polyaccel.comm.benchmark import SpeedRow, speed_table
from polyaccel.core.types import DType, ParamSpec
from polyaccel.job.trial_env import TrialModel
from polyaccel.planner.autotune import fit
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.hardware_probe import USUAL
from polyaccel.planner.autotune.records import TrialLog, TrialRecord

CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
}


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "rates_here", lambda folder: USUAL)


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """What `polyaccel plan --json` says of `CONFIG` on 4 ranks."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    assert main(["plan", str(file), *words, "-n", "4", "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def stages(found: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(each["candidate"]["stage"], each["candidate"]["offload"]) for each in found]


def test_what_fits_is_ordered_and_the_next_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, "1e9", "--fit", "9G")
    assert (0, "none") not in stages(found["fitting"]), "16 bytes a parameter"
    assert (3, "none") in stages(found["fitting"])
    assert {each["candidate"]["micro_batch"] for each in found["fitting"]} == {4}, "activations are not known"
    seconds = [each["step_s"] for each in found["fitting"]]
    assert seconds == sorted(seconds)
    for each in found["fitting"]:
        assert each["device_nbytes"] <= 9 << 30
    whole = next(each for each in found["too_large"] if stages([each]) == [(0, "none")])
    assert whole["device_nbytes"] == pytest.approx(16e9, rel=0.15)
    assert "more than the memory of the device" in whole["why"]
    assert found["too_large"][0]["step_s"] <= found["too_large"][-1]["step_s"]


def test_figures_are_those_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, "1e8", "--fit", "100G")
    usual = planned(tmp_path, capsys, "1e8")
    peaks = {
        (each["stage"], each["offload"], each["offload_param"]): each["peak_nbytes"]["device"]
        for each in usual["settings"]
    }
    assert len(found["fitting"]) == 9
    for each in found["fitting"]:
        one = each["candidate"]
        assert each["device_nbytes"] == peaks[one["stage"], one["offload"], one["offload_param"]]


def test_nothing_fits_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, capsys, "1e9", "--fit", "64M", code=1)["fitting"] == []


def test_activations_decide_the_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 256}
    described = transformers.LlamaConfig(**sizes, num_hidden_layers=4, architectures=["LlamaForCausalLM"])
    described.save_pretrained(tmp_path)
    words = (str(tmp_path), "--sequence-length", "256", "--compute", "1.0")
    every = planned(tmp_path, capsys, *words, "--fit", "4G")
    needs = {
        (each["candidate"]["micro_batch"], each["candidate"]["recomputes"]): each["device_nbytes"]
        - each["states_nbytes"]
        for each in every["fitting"]
        if stages([each]) == [(1, "none")]
    }
    assert set(needs) == {(rows, way) for rows in (1, 2, 4, 8) for way in (False, True)}
    kept = [needs[rows, False] for rows in (2, 4, 8)]
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=0.01)
    assert needs[8, True] < 0.6 * needs[8, False]
    states = max(each["states_nbytes"] for each in every["fitting"])
    seconds = {each["candidate"]["recomputes"]: each["step_s"] for each in reversed(every["fitting"])}
    assert 1.0 < seconds[False] < seconds[True]
    tight = planned(tmp_path, capsys, *words, "--fit", str(states + (needs[4, False] + needs[8, False]) // 2))
    assert all(each["candidate"]["recomputes"] for each in tight["fitting"] if each["candidate"]["micro_batch"] == 8)


def test_the_trials_of_a_tuner_and_speeds_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = tuple(ParamSpec(f"layer{number}.weight", (512, 512), DType.BFLOAT16) for number in range(8))
    log = TrialLog(tmp_path / "results", "key", overwrite=True)
    log.keep_model(TrialModel(specs, {}, 100 << 20, False, 0, {}))
    one = Candidate(stage=1, micro_batch=4, accumulation=2, bucket_numel=500_000_000)
    phases = {"forward": 0.2, "backward": 0.5, "update": 0.01}
    log.add(TrialRecord(candidate=one, step_s=0.75, phase_s=phases, peak_nbytes=300 << 20))
    rows = [SpeedRow(name, 1 << 20, 1e-3, 1e-3) for name in ("all_reduce", "all_gather", "reduce_scatter")]
    (tmp_path / "comm.json").write_text(speed_table("shm", "cpu", "float32", (4,), "today", rows).to_json())
    words = ("--fit", "400M", "--trials", str(tmp_path / "results"), "--comm", str(tmp_path / "comm.json"))
    found = planned(tmp_path, capsys, "2e6", *words)
    again = {
        (one["stage"], one["micro_batch"], one["recomputes"]): each
        for each in found["fitting"]
        for one in [each["candidate"]]
    }[1, 4, False]
    assert again["step_s"] == pytest.approx(0.75, rel=0.05)
    assert again["device_nbytes"] == pytest.approx(300 << 20, rel=0.02)


def test_a_person_reads_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    assert main(["plan", str(tmp_path / "ds.json"), "1e9", "-n", "4", "--fit", "--memory", "9G"]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert said.startswith("Least communication and update time of ")
    assert "setting update s device states host" in said, "no pass is timed: that is not the time of a step"
    assert "does not fit: " in said
    assert "Assumed: collectives are not measured, 1 GB/s a rank is assumed" in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--trials", "there"], 2, "--trials is for --fit"),
        (["--fit", "1G", "--trials", "absent"], 1, "absent has no trials"),
        (["--fit", "much"], 2, "'much' is not a size"),
        (["--fit"], 2, "--memory"),
    ],
    ids=["alone", "absent", "size", "no memory"],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    assert main(["plan", str(tmp_path / "ds.json"), "1e9", "-n", "4", *words]) == code
    assert said in " ".join(capsys.readouterr().err.split())
