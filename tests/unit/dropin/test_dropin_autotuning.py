"""`deepspeed --autotuning`: the words of its trials, and the config that they tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from polyaccel_deepspeed.commands import launch
from polyaccel_deepspeed.launcher import config_of, without_autotuning

from polyaccel.launch.base import Job, JobResult
from polyaccel.planner.autotune import tuned_job
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.records import TrialRecord
from polyaccel.planner.autotune.results import BEST_FILE
from polyaccel.planner.autotune.tuner import TuneResult


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--autotuning", "run", "--num_gpus", "2", "a.py"], ["--num_gpus", "2", "a.py"]),
        (["--num_gpus", "2", "--autotuning=tune", "a.py", "-x"], ["--num_gpus", "2", "a.py", "-x"]),
        (["--autotuning", "run", "a.py", "--autotuning", "1"], ["a.py", "--autotuning", "1"]),
        (["a.py"], ["a.py"]),
    ],
)
def test_trials_are_started_without_the_option(words: list[str], left: list[str]) -> None:
    assert without_autotuning(words) == left


def test_the_config_is_the_one_that_the_script_gets() -> None:
    assert config_of(["--deepspeed", "--deepspeed_config", "ds.json"]) == "ds.json"
    assert config_of(["--deepspeed_config=ds.json"]) == "ds.json"
    assert config_of(["--x", "1", "--deepspeed", "ds.json", "--y"]) == "ds.json"


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("asked", ["run", "tune"])
def test_run_trains_with_the_best_config_and_tune_does_not(
    asked: str, best: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[Any] = []
    started: list[Job] = []

    def tune_job(job: Any, section: Any) -> tuple[TuneResult, Path]:
        tuned.append(job)
        one = Candidate(stage=2, micro_batch=4, accumulation=1, bucket_numel=1)
        record = TrialRecord(candidate=one, step_s=1.0, peak_nbytes=1) if best else None
        (tmp_path / BEST_FILE).write_text("{}")
        return TuneResult(best=record, records=(), estimates=(), limit_nbytes=None, why=""), tmp_path

    monkeypatch.setattr(tuned_job, "tune_job", tune_job)
    monkeypatch.setattr(
        "polyaccel.launch.local.LocalLauncher.run", lambda launcher, job: started.append(job) or JobResult(0)
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": None}))
    words = ["--num_gpus", "2", "train.py", "--deepspeed_config", "ds.json"]
    assert launch(["--autotuning", asked, *words]) == (0 if best else 1)
    (job,) = tuned
    assert job.command[-len(words) :] == tuple(words)
    assert (job.config_file, job.world_size, job.where) == ("ds.json", 2, ("--nproc", "2"))
    assert "gradient_clipping" not in job.tree or job.tree["gradient_clipping"] is not None
    trains = best and asked == "run"
    config = ("--deepspeed_config", str(tmp_path / "ds_config_optimal.json"))
    assert [made.arguments for made in started] == ([config] if trains else [])
