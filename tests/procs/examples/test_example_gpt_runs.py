"""examples/gpt/train.py as its users start it: by the launcher, by torchrun and alone; interrupted and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from polyaccel.job.ports import free_port

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "examples" / "gpt" / "train.py")
BY_LAUNCHER = [sys.executable, "-m", "polyaccel", "run", "--ranks", "2"]
BY_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ALONE = [sys.executable]
SMALL = ["--size", "tiny", "--steps", "6", "--precision", "fp32", "--eval-windows", "6", "--eval-every", "3"]
STEPS = range(1, 7)


def environment(cache: Path) -> dict[str, str]:
    """Nobody's rank, with a cache of its own for all of the session's runs."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**inherited, "XDG_CACHE_HOME": str(cache)}


def start(launcher: list[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in `folder`."""
    return subprocess.run(
        [*launcher, SCRIPT, *arguments],
        cwd=folder,
        env=environment(folder.parent / "cache"),
        capture_output=True,
        text=True,
        timeout=200,
    )


def losses(folder: Path, name: str = "gpt") -> dict[int, float]:
    """Training losses by step, as exactly as they were written."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "tag" not in record}


def validation_losses(folder: Path) -> dict[int, float]:
    lines = (folder / "runs" / "gpt" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["value"] for record in map(json.loads, lines) if "tag" in record}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of six steps was made at once."""
    folder = tmp_path_factory.mktemp("whole")
    done = start(BY_LAUNCHER, folder, *SMALL)
    assert done.returncode == 0, done.stderr
    (folder / "output").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of six steps stopped after three."""
    folder = tmp_path_factory.mktemp("half")
    done = start(BY_LAUNCHER, folder, *SMALL, "--until", "3")
    assert done.returncode == 0, done.stderr
    assert "stopped at step 3 of 6" in done.stdout
    assert set(losses(folder)) == {1, 2, 3}
    return folder


def copied(half: Path, tmp_path: Path) -> Path:
    """Another run that stopped after three steps."""
    return Path(shutil.copytree(half, tmp_path / "copy"))


def test_a_run_leaves_everything_there_is_to_see(whole: Path) -> None:
    run = whole / "runs" / "gpt"
    names = {"settings.json", "run.json", "metrics.jsonl", "log.jsonl", "sample.txt", "report.html"}
    assert names <= {file.name for file in run.iterdir()}
    assert (run / "checkpoint").is_dir()
    sample = (run / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert not any(line.endswith(" ") for line in sample.splitlines())
    resolved = json.loads((run / "run.json").read_text())["config"]
    assert (resolved["train_batch_size"], resolved["zero_optimization"]["stage"]) == (16, 2)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "tag" not in record]
    assert [record["step"] for record in steps] == list(STEPS)
    assert all(record["grad_norm"] > 0 for record in steps)
    assert (run / "ranks" / "1.jsonl").is_file()


def test_three_ranks_train_on_a_batch_that_they_can_share(tmp_path: Path) -> None:
    launcher = [*BY_LAUNCHER[:-1], "3"]
    done = start(launcher, tmp_path, *SMALL, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert set(losses(tmp_path)) == {1, 2}
    resolved = json.loads((tmp_path / "runs" / "gpt" / "run.json").read_text())["config"]
    assert resolved["train_batch_size"] == 18
    assert "18 samples a step" in done.stdout


def test_it_learns(whole: Path) -> None:
    found = validation_losses(whole)
    assert set(found) == {3, 6}
    assert found[6] < found[3]


def test_without_a_terminal_the_output_is_plain_lines(whole: Path) -> None:
    lines = (whole / "output").read_text().splitlines()
    assert any(line.startswith("[rank 0] step 1/6  loss 5.") for line in lines)
    assert any(line.startswith("[rank 0] step 6: validation loss ") for line in lines)
    assert not any("\x1b" in line or "[rank 1]" in line for line in lines)


def test_resumed_under_torchrun_it_continues_exactly(whole: Path, half: Path, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    done = start(BY_TORCHRUN, folder, "--resume", "--eval-every", "3", "--eval-windows", "6")
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(whole)
    assert validation_losses(folder) == validation_losses(whole)
    samples = [(place / "runs" / "gpt" / "sample.txt").read_bytes() for place in (folder, whole)]
    assert samples[0] == samples[1]


def test_resumed_alone_it_continues_with_the_same_data(whole: Path, half: Path, tmp_path: Path) -> None:
    """One process goes on with what two have saved; sums are in another order, everything else is the same."""
    folder = copied(half, tmp_path)
    done = start(ALONE, folder, "--resume", "--eval-windows", "6")
    assert done.returncode == 0, done.stderr
    assert set(losses(folder)) == set(STEPS)
    assert validation_losses(folder)[6] == pytest.approx(validation_losses(whole)[6], rel=1e-5)


def test_ctrl_c_ends_it_with_a_checkpoint_and_one_line(whole: Path, tmp_path: Path) -> None:
    job = subprocess.Popen(
        [*BY_LAUNCHER, SCRIPT, *SMALL, "--steps", "1000000"],
        cwd=tmp_path,
        env=environment(whole.parent / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whatever started pytest may ignore it
    )
    limit = threading.Timer(200, job.kill)
    limit.start()
    try:
        assert job.stdout is not None
        started = any("1/1000000  loss" in line for line in job.stdout)
        job.send_signal(signal.SIGINT)
        rest, errors = job.communicate()
    finally:
        limit.cancel()
        job.kill()
    assert started, errors
    assert job.returncode == 130, errors
    assert "Traceback" not in errors
    (said,) = [line for line in rest.splitlines() if "stopped by" in line]
    step = int(said.partition("stopped by SIGINT at step ")[2].partition(" of 1000000; ")[0])
    assert said.endswith("; checkpoint: runs/gpt/checkpoint; --resume continues")
    done = start(ALONE, tmp_path, "--resume", "--until", str(step + 1))
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path)) == list(range(1, step + 2))


def test_what_cannot_be_resumed_is_an_error_on_every_rank(half: Path, tmp_path: Path) -> None:
    """Without a launcher: one would end the other rank as soon as the first has ended, before it can say so too."""
    folder = copied(half, tmp_path)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*ALONE, SCRIPT, "--resume", "--steps", "9"],
            cwd=folder,
            env={**environment(half.parent / "cache"), **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], errors
    for said in errors:
        assert "error: a resumed run continues exactly and cannot change steps 9" in said
        assert "Traceback" not in said
    assert losses(folder) == losses(half)
