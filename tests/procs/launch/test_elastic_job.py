"""A job whose ranks are killed goes on with those that are left: the same losses, and each sample once an epoch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import elastic_job
import pytest
from elastic_job import BATCH, SAMPLES

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.job.memory_server.start import can_keep
from polyaccel.testkit.ranks.threads import run_threads

pytestmark = pytest.mark.skipif(not can_keep(), reason="replicas need Linux")
EPOCHS = 3
STEPS = EPOCHS * SAMPLES // BATCH
LIMIT_S = 240.0


def undisturbed() -> list[float]:
    """The losses of the run that nobody disturbs, on one rank."""

    def train(communicator: Communicator) -> list[float]:
        model = elastic_job.build()
        config = {**elastic_job.CONFIG, "checkpoint": {}}
        engine, *_ = polyaccel.initialize(model=model, config=config, training_data=elastic_job.Numbered())
        losses = [engine.train_batch().item() for _ in range(STEPS)]
        engine.destroy()
        return losses

    return list(run_threads(1, train)[0])


def test_three_ranks_then_two_then_one_see_each_sample_once_an_epoch(tmp_path: Path) -> None:
    """Rank 1 is killed within step 4, rank 0 of those that are left right after step 7. No more than one step is done
    twice, and what counts of each step is what its last doing had."""
    kills = "0:1:within:4,1:0:after:7"
    options = ["--nproc", "3", "--restarts", "2", "--elastic", "1"]
    script = [str(Path(elastic_job.__file__)), str(tmp_path / "saves"), str(STEPS), kills]
    done = subprocess.run(
        [sys.executable, "-m", "polyaccel", "run", *options, *script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    begins = {tuple(map(int, each)) for each in re.findall(r"begins (\d) (\d) (\d+)", done.stdout)}
    (first, second, third) = sorted(begins)
    assert first == (0, 0, 2)
    assert second == (1, 3, 3)  # the update of step 4 had not begun
    assert third[0] == 2
    assert third[1] in (6, 7)
    assert third[2] == 6

    losses, samples = defaultdict[tuple[int, int], list[float]](list), defaultdict[tuple[int, int], list[int]](list)
    for start, step, loss, seen in re.findall(r"step (\d) (\d+) (\S+) ([\d ]+)", done.stdout):
        losses[int(step), int(start)].append(float(loss))
        samples[int(step), int(start)] += map(int, seen.split())
    last = {step: max(start for number, start in losses if number == step) for step in range(1, STEPS + 1)}
    found = [sum(losses[each]) / len(losses[each]) for each in last.items()]
    assert found == pytest.approx(undisturbed(), rel=1e-4)
    for epoch in range(EPOCHS):
        steps = range(epoch * SAMPLES // BATCH + 1, (epoch + 1) * SAMPLES // BATCH + 1)
        assert Counter(number for step in steps for number in samples[step, last[step]]) == Counter(range(SAMPLES))
    assert all(len(samples[each]) == BATCH for each in last.items())
    assert re.search(r"restart 1 of 2 with 2 of 3 ranks: rank 1 \(pid \d+\) was killed by SIGKILL", done.stderr)
    assert re.search(r"restart 2 of 2 with 1 of 2 ranks: rank 0 \(pid \d+\) was killed by SIGKILL", done.stderr)
    assert "continuing from the replica of step 3 in memory: no step is lost" in done.stderr
    assert not (tmp_path / "saves").exists()


BARE = """
import os, sys
start = int(os.environ["POLYACCEL_RESTART_COUNT"])
os.write(1, f"start {start} {os.environ['WORLD_SIZE']}\\n".encode())  # in one piece
if start < 2 and os.environ["RANK"] == "0":
    sys.exit(3 + start)
"""


@pytest.mark.parametrize(("restarts", "code", "starts"), [(1, 4, 2), (2, 0, 3)])
def test_a_rank_that_fails_is_started_again_as_often_as_was_said(
    restarts: int, code: int, starts: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(BARE)
    done = subprocess.run(
        [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", "--restarts", str(restarts), str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stderr
    assert set(re.findall(r"^\[rank 0\] start (\d 2)", done.stdout, re.MULTILINE)) == {f"{n} 2" for n in range(starts)}
    assert len(re.findall(r"^polyaccel: restart \d of \d: rank 0", done.stderr, re.MULTILINE)) == min(restarts, 2)
