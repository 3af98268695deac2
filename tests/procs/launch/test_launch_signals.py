"""Every signal that a scheduler can send reaches the ranks, and a closed stream ends no job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_job import Job, is_alive

from polyaccel.launch.signals import ENDING, NOTICES, SILENT, SignalInbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")

HANDLED = """
got, handled = os.pipe()  # signal.pause() would miss a signal that arrives right before it
def handle(signum, frame):
    print("got", signum, flush=True)
    os.write(handled, b"x")
for each in {signals}:
    signal.signal(each, handle)
ready()
os.read(got, 1)
"""
FOR_EVER = """
ready()
while True:
    signal.pause()
"""
OTHERS = [signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGIO, signal.SIGPWR, signal.SIGWINCH]


@pytest.mark.parametrize("signum", [*OTHERS, int(signal.SIGRTMIN) + 5], ids=str)
def test_a_notice_reaches_the_handlers_of_all_ranks(tmp_path: Path, signum: int) -> None:
    with Job(tmp_path, HANDLED.format(signals=[int(signum)])) as job:
        job.pids()
        os.kill(job.process.pid, signum)
        code, stdout, _ = job.finish()
    assert code == 0
    assert all(f"[rank {rank}] got {int(signum)}\n" in stdout for rank in range(2))


def test_a_rank_without_a_handler_ends_of_it_and_is_named(tmp_path: Path) -> None:
    with Job(tmp_path, FOR_EVER) as job:
        ranks, _ = job.pids()
        job.process.send_signal(signal.SIGUSR2)
        code, _, stderr = job.finish()
    assert code == 128 + signal.SIGUSR2
    assert "SIGUSR2 is passed on" in stderr
    assert f"rank 0 (pid {ranks[0]})" in stderr or f"rank 1 (pid {ranks[1]})" in stderr
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize("signum", [signal.SIGQUIT, signal.SIGABRT])
def test_other_signals_ask_to_end_as_sigterm_does(signum: signal.Signals, tmp_path: Path) -> None:
    with Job(tmp_path, HANDLED.format(signals=[int(signum)])) as job:
        job.pids()
        job.process.send_signal(signum)
        code, stdout, _ = job.finish()
    assert code == 0
    assert f"[rank 1] got {int(signum)}\n" in stdout


def test_all_signals_that_would_end_a_process_are_passed_on_or_left_to_the_system_on_purpose() -> None:
    known = {*map(int, ENDING), *NOTICES}
    job_control = {signal.SIGCHLD, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT}
    by_a_fault = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
    harmless = {signal.SIGKILL, signal.SIGURG, signal.SIGPIPE, signal.SIGXFSZ}
    left = {int(each) for each in signal.valid_signals()} - known
    assert left == {int(each) for each in job_control | by_a_fault | harmless}
    assert set(SILENT) <= set(NOTICES)


def test_a_handler_of_the_program_that_starts_ranks_stays() -> None:
    def own(signum: int, frame: object) -> None: ...

    former = signal.signal(signal.SIGALRM, own)
    try:
        with SignalInbox((signal.SIGALRM, signal.SIGUSR2)) as inbox:
            assert signal.getsignal(signal.SIGALRM) is own
            os.kill(os.getpid(), signal.SIGUSR2)
            assert inbox.wait(10) == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_from_the_start_does_no_harm(closed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "print('a line', flush=True)\n"
        "assert sys.stdin is None or sys.stdin.read() == ''\n"
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').close()\n"
    )
    command = f"exec {sys.executable} -m polyaccel run --nproc 2 {script} {closed}"
    done = _run(["sh", "-c", command])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_job_whose_reader_goes_ends_with_its_own_code(reader: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for step in range(2000): print('a line of some length', step, flush=True)\n")
    command = (
        f"set -o pipefail; {sys.executable} -m polyaccel run --nproc 2 {script} | {reader}; exit ${{PIPESTATUS[0]}}"
    )
    done = _run(["bash", "-c", command])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_full_disk_under_the_output_ends_no_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('a line', flush=True)\n")
    done = _run(["sh", "-c", f"{sys.executable} -m polyaccel run --nproc 2 {script} > /dev/full"])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
