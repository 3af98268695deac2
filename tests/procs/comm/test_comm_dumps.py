"""Ranks of real jobs that hang, time out, crash or are asked leave flight recorders, which `comm diff` reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyaccel.cli.main import main
from polyaccel.comm.flight_recorder.dump import read_dump

PRELUDE = """
import os, signal, sys, threading, time
if os.environ["POLYACCEL_COMM"] == "shm":
    sys.modules["torch"] = None  # shared memory needs none, and its import costs more than all the rest
from polyaccel import comm
from polyaccel.accelerators.detect import get_accelerator
from polyaccel.core.types import DType
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
def say_when_in(op):  # once this rank makes such a call, in a file beside the script and on standard output
    def look():
        while comm.default_communicator().recorder.entries[-1].collective.operation != op:
            time.sleep(0.01)
        open(f"{{__file__}}.{{op}}", "w").close()
        print("in", op, flush=True)
    threading.Thread(target=look, daemon=True).start()
# The time limit is not that of imports.
open(f"{{__file__}}.{{os.environ['RANK']}}", "w").close()
for each in range(2):
    wait_for(f"{{__file__}}.{{each}}")
comm.init_distributed(timeout={timeout})
rank = comm.get_rank()
buffer = get_accelerator().allocate(8, DType.FLOAT32)
comm.all_reduce(buffer)
"""


class Job:
    """A script on two ranks under `polyaccel run`, and the folder that its dumps go to."""

    def __init__(self, folder: Path, body: str, *, timeout_s: float, backend: str) -> None:
        self.dumps = folder / "dumps"
        script = folder / "train.py"
        script.write_text(PRELUDE.format(timeout=timeout_s) + body)
        environ = {
            **os.environ,
            "POLYACCEL_DUMP_DIR": str(self.dumps),
            "POLYACCEL_COMM": backend,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", "--grace-period", "60", str(script)],
            env={name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, *wanted: str) -> str:
        """The output up to the last of these texts; each once."""
        output, missing = "", set(wanted)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            output += line
            missing = {text for text in missing if text not in output}
            if not missing:
                return output
        raise AssertionError(f"{missing} never came: {output}")

    def end(self) -> str:
        output, _ = self.process.communicate(timeout=200)
        return output


@pytest.fixture(params=["shm", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.process.kill()
        job.process.communicate()


def diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["comm", "diff", str(folder)])
    return code, capsys.readouterr().out


def test_a_timeout_leaves_dumps_of_the_rank_that_waits_and_of_the_one_that_does_not(
    jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "comm.barrier() if rank == 0 else signal.pause()"
    for backend in ("shm", "gloo"):  # the jobs wait for the limit at the same time
        (tmp_path / backend).mkdir()
        jobs.append(Job(tmp_path / backend, body, timeout_s=30, backend=backend))  # that of the start too
    for job in jobs:
        output = job.end()
        assert job.process.returncode == 1, output
        assert "compare all ranks with `polyaccel comm diff" in output
        # Rank 1 was ended by the launcher's SIGTERM, and wrote its record on the way, although its script was through.
        assert [read_dump(job.dumps / f"rank-{rank}.json").rank for rank in range(2)] == [0, 1], output
        assert read_dump(job.dumps / "rank-1.json").reason == "SIGTERM"
        code, text = diff(job.dumps, capsys)
        assert code == 1
        assert "the ranks part at #1:" in text
        assert "rank 0: barrier (waiting)" in text
        assert "rank 1: did not call it, its last was #0 all_reduce sum 8 x float32" in text


def test_sigusr1_is_served_while_a_collective_hangs(
    jobs: list[Job], tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
print("pid", rank, os.getpid(), flush=True)
if rank == 0:
    say_when_in("barrier")
    comm.barrier()
while True:
    signal.pause()
"""
    jobs.append(Job(tmp_path, body, timeout_s=100, backend=backend))
    output = jobs[0].read_until("pid 0 ", "pid 1 ")
    pids = {int(words[-2]): int(words[-1]) for words in map(str.split, output.splitlines()) if "pid" in words}
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    output += jobs[0].read_until("rank-0.json", "rank-1.json")
    assert jobs[0].process.poll() is None, "asking ends nobody"
    assert {read_dump(jobs[0].dumps / f"rank-{rank}.json").reason for rank in range(2)} == {"SIGUSR1"}
    if "in barrier" not in output:
        jobs[0].read_until("in barrier")
    for pid in pids.values():  # a second time
        os.kill(pid, signal.SIGUSR1)
    jobs[0].read_until("rank-0.json", "rank-1.json")
    code, text = diff(jobs[0].dumps, capsys)
    assert code == 1
    assert "rank 0: barrier (waiting)" in text


def test_an_uncaught_exception_leaves_dumps_of_all_ranks(
    jobs: list[Job], tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
if rank == 1:
    wait_for(f"{__file__}.barrier")
    raise ValueError("bad batch")
say_when_in("barrier")
comm.barrier()
"""
    jobs.append(Job(tmp_path, body, timeout_s=30, backend=backend))
    output = jobs[0].end()
    assert jobs[0].process.returncode == 1
    assert "ValueError: bad batch" in output
    assert read_dump(jobs[0].dumps / "rank-1.json").reason == "uncaught ValueError"
    code, text = diff(jobs[0].dumps, capsys)
    assert (code, "rank 1: did not call it" in text) == (1, True), text


def test_a_run_that_ends_well_leaves_nothing_and_a_forked_worker_dies_of_sigterm(
    jobs: list[Job], tmp_path: Path
) -> None:
    body = """
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=signal.pause)
worker.start()
worker.terminate()
worker.join(20)
assert worker.exitcode == -signal.SIGTERM, worker.exitcode
comm.barrier()
comm.destroy_process_group()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    jobs.append(Job(tmp_path, body, timeout_s=30, backend="shm"))
    output = jobs[0].end()
    assert jobs[0].process.returncode == 0, output
    assert not jobs[0].dumps.exists(), output


def test_a_scripts_own_handler_stays(jobs: list[Job], tmp_path: Path) -> None:
    body = "assert signal.getsignal(signal.SIGUSR1) is own\n"
    script = tmp_path / "own"
    script.mkdir()
    job = Job(script, body, timeout_s=30, backend="shm")
    jobs.append(job)
    (script / "train.py").write_text(
        "import signal\ndef own(*_): pass\nsignal.signal(signal.SIGUSR1, own)\n" + PRELUDE.format(timeout=30) + body
    )
    output = job.end()
    assert job.process.returncode == 0, output


DYING = """
from polyaccel.errors import CommError
def path(name):
    return os.path.join(os.environ["POLYACCEL_DUMP_DIR"], name)
if rank == 1:
    wait_for(path("prepared"))
    os.kill(os.getpid(), signal.SIGKILL)
"""
CAUGHT = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(path("prepared"), "w").close()
try:
    comm.barrier()
except CommError:
    sys.exit("the other rank is gone")
"""
HANDLED = """
import logging
logging.basicConfig(level="INFO")  # as the engine shows rank 0's lines
def end(*_):
    wait_for(path("rank-0.json"))
    print("ended by its own handler", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)  # in place of the recorder's
open(path("prepared"), "w").close()
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("backend", "body", "said", "reason"),
    [
        ("shm", CAUGHT, "the other rank is gone", "a collective failed"),
        ("gloo", CAUGHT, "the other rank is gone", "a collective failed"),
        ("shm", HANDLED, "ended by its own handler", "SIGTERM"),
    ],
)
def test_a_killed_rank_leaves_none_and_is_the_one_that_is_missing(
    jobs: list[Job], tmp_path: Path, backend: str, body: str, said: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dumps").mkdir()
    for rank in range(2):
        (tmp_path / "dumps" / f"rank-{rank}.json").write_text("of an earlier job")
    jobs.append(Job(tmp_path, DYING + body, timeout_s=30, backend=backend))
    output = jobs[0].end()
    assert jobs[0].process.returncode in (1, 128 + signal.SIGKILL), output
    assert said in output
    assert read_dump(jobs[0].dumps / "rank-0.json").reason == reason
    assert ("compare all ranks with" in output) == (body is not HANDLED), output  # no call hangs: nothing to tell
    left = {"rank-0.json", "rank-0.earlier", "rank-1.earlier"}
    assert {file.name for file in jobs[0].dumps.glob("rank-*")} == left, output
    _, text = diff(jobs[0].dumps, capsys)
    assert "rank 1: no dump; killed, or never started?" in text


def test_diff_refuses_what_it_cannot_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "diff", str(tmp_path)]) == 1
    assert "there is no rank-N.json in the folder" in capsys.readouterr().err
    (tmp_path / "rank-0.json").write_text("{}")
    assert main(["comm", "diff", str(tmp_path)]) == 1
    assert "rank-0.json is not a dump" in capsys.readouterr().err
