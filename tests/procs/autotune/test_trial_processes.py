"""Trials as processes: they end with their figures, with their time, and with whoever started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.job.trial_env import TRIAL_VARIABLE
from polyaccel.launch.tree import ProcessTracker
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.trials import TrialPlan, run_trial

OWN = Candidate(stage=1, micro_batch=2, accumulation=4, bucket_numel=1000)
WRITE = f"""
import os, json
from pathlib import Path
folder = Path(os.environ["{TRIAL_VARIABLE}"])
def write(step, seconds):
    figures = {{"step": step, "step_time_s": seconds, "phase_s": {{"forward": seconds / 2}}, "peak_memory_nbytes": 5}}
    with open(folder / "metrics.jsonl", "a") as file:
        print(json.dumps(figures), file=file)
"""
GRANDCHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"


def plan(program: str, *more: str, limit_s: float = 60.0, **mapped: str) -> TrialPlan:
    return TrialPlan(
        command=(sys.executable, "-c", WRITE + program, *more),
        config_file="ds.json",
        config_tree={"train_batch_size": 16, "optimizer": {"type": "Adam"}},
        train_batch_size=16,
        first_step=2,
        last_step=4,
        limit_s=limit_s,
        mapped=mapped,
    )


def left(folder: Path) -> set[int]:
    """The processes of a trial that are still there."""
    return ProcessTracker(str(folder.resolve()), TRIAL_VARIABLE).members()


def test_a_trial_is_ended_with_its_figures_and_all_that_it_has_started(tmp_path: Path) -> None:
    steps = "for n in range(1, 9): write(n, abs(n - 3) / 8 + 1)"
    program = f"import subprocess, sys, time\n{GRANDCHILD}\n{steps}\ntime.sleep(600)"
    record, told = run_trial(plan(program), OWN, tmp_path / "trial")
    assert (record.step_s, record.phase_s, record.peak_nbytes) == (1, {"forward": 0.5}, 5), "the shortest step"
    assert record.is_good
    assert told is None
    assert left(tmp_path / "trial") == set()


def test_a_trial_that_hangs_ends_with_its_time(tmp_path: Path) -> None:
    program = f"import subprocess, sys, time\n{GRANDCHILD}\nwrite(1, 1)\ntime.sleep(600)"
    record, _ = run_trial(plan(program, limit_s=1.0), OWN, tmp_path / "trial")
    assert "steps when its 1 s were over" in record.failure
    assert not record.is_good
    assert left(tmp_path / "trial") == set()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("write(1, 1); raise SystemExit('no such data')", "it ended with code 1 after 1 steps: no such data"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with code -9 after 0 steps"),
    ],
    ids=["exits", "killed"],
)
def test_a_trial_that_ends_too_soon_says_why(program: str, said: str, tmp_path: Path) -> None:
    record, _ = run_trial(plan(program), OWN, tmp_path / "trial")
    assert record.failure == said


def test_the_rank_that_needs_most_memory_counts(tmp_path: Path) -> None:
    program = (
        "(folder / 'ranks').mkdir(); (folder / 'ranks' / '1.log.jsonl').write_text('{}')\n"
        "(folder / 'ranks' / '1.jsonl').write_text(json.dumps({'step': 1, 'peak_memory_nbytes': 9}) + '\\n{\"st')\n"
        "for n in range(1, 5): write(n, n)"
    )
    record, _ = run_trial(plan(program), OWN, tmp_path / "trial")
    assert (record.step_s, record.peak_nbytes) == (2, 9)


def test_steps_that_were_made_count_where_a_script_is_short(tmp_path: Path) -> None:
    record, _ = run_trial(plan("for n in (1, 2, 3): write(n, n)"), OWN, tmp_path / "trial")
    assert (record.step_s, record.failure) == (2, "")


def test_a_script_gets_the_trial_s_values_wherever_it_looks(tmp_path: Path) -> None:
    program = (
        "import sys; (folder / 'argv.json').write_text(json.dumps(sys.argv[1:]))\nfor n in (1, 2, 3, 4): write(n, 1)"
    )
    given = ["--deepspeed_config", "ds.json", "--config=ds.json", "--rows", "7", "--other", "ds.json.bak"]
    asked = plan(program, *given, train_micro_batch_size_per_gpu="--rows", gradient_accumulation_steps="--steps")
    folder = tmp_path / "trial"
    (folder / "old").mkdir(parents=True)
    run_trial(asked, OWN, folder)
    config = str(folder / "config.json")
    said = json.loads((folder / "argv.json").read_text())
    assert said == [
        "--deepspeed_config",
        config,
        f"--config={config}",
        "--other",
        "ds.json.bak",
        "--rows",
        "2",
        "--steps",
        "4",
    ]
    tree = json.loads((folder / "config.json").read_text())
    assert (tree["optimizer"], tree["gradient_accumulation_steps"]) == ({"type": "Adam"}, 4)
    assert tree["run_dir"] == str(folder)
    assert not (folder / "old").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process of its parent's end")
def test_a_trial_ends_with_a_tuner_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    fifo = tmp_path / "ends"
    os.mkfifo(fifo)
    program = f"import time; end = open({str(fifo)!r}, 'w'); print('begun', file=end, flush=True); time.sleep(600)"
    words = [repr(program), repr(str(folder))]
    tuner = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_trial_processes import OWN, plan, run_trial
run_trial(plan({words[0]}), OWN, Path({words[1]}))
"""
    process = subprocess.Popen([sys.executable, "-c", tuner])
    try:
        with fifo.open() as end:
            assert end.readline() == "begun\n"
            process.send_signal(signal.SIGKILL)
            assert end.read() == "", "the other end is closed when the trial has ended"
    finally:
        process.kill()
        process.wait()
