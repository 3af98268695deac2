"""The launcher ends with the code of its job, whatever that is, and keeps its process id in a file where asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SIGNALS = sorted({*signal.valid_signals()} - {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""Those that end a process or stop it; those that stop it are told elsewhere."""
STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


def launched(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", "1", *options]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("code", range(256))
def test_an_exit_code_arrives_unchanged(code: int, tmp_path: Path) -> None:
    assert launched(tmp_path, "--no-python", "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("number", [int(each) for each in SIGNALS if each not in STOPPING])
def test_a_signal_is_128_plus_its_number(number: int, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        f"import os, signal\nif {number} != 9: signal.signal({number}, signal.SIG_DFL)\n"
        f"signal.pthread_sigmask(signal.SIG_UNBLOCK, [{number}])\nos.kill(os.getpid(), {number})\n"
    )
    assert launched(tmp_path, "rank.py").returncode == 128 + number


def test_the_launchers_process_id_is_in_a_file_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, pathlib\n"
        "(file,) = pathlib.Path(os.environ['TMPDIR']).glob('*.polyaccel')\n"
        "print(file.name, file.read_text().strip() == str(os.getppid()))\n"
    )
    done = launched(tmp_path, "--save-pid", "rank.py")
    assert done.returncode == 0, done.stderr
    name, is_that_of_the_launcher = done.stdout.split()[-2:]
    assert is_that_of_the_launcher == "True"
    assert f"the launcher's process id is in {tmp_path / name}" in done.stderr
    assert not (tmp_path / name).exists()
