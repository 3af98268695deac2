"""What a rank finds when it starts, and what the user sees of what it prints."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from launcher_job import LIMIT_S, Job, let_go, wait_gone

REPORT = """
import json
print(json.dumps({"env": dict(os.environ), "argv": sys.argv[1:], "stdin": sys.stdin.read()}))
"""


def reports(stdout: str) -> dict[int, dict[str, object]]:
    return {
        int(rank): json.loads(text) for rank, text in re.findall(r"^\[rank (\d)\] (.*)$", stdout, flags=re.MULTILINE)
    }


def test_ranks_have_the_variables_of_torchrun_and_deepspeed(tmp_path: Path) -> None:
    with Job(tmp_path, REPORT, nproc=3, environment={"USER_VARIABLE": "kept"}) as job:
        code, stdout, stderr = job.finish()
    assert (code, stderr) == (0, "")
    environments = {rank: report["env"] for rank, report in reports(stdout).items()}
    assert sorted(environments) == [0, 1, 2]
    for rank, environment in environments.items():
        assert isinstance(environment, dict)
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == environment["LOCAL_SIZE"] == "3"
        assert (environment["CROSS_RANK"], environment["CROSS_SIZE"]) == ("0", "1")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["USER_VARIABLE"] == "kept"
    assert len({environment["MASTER_PORT"] for environment in environments.values()}) == 1


def test_arguments_arrive_as_written(tmp_path: Path) -> None:
    arguments = ("--nproc", "7", "-v", "--", "two words", "", "--mod", "*", "--version", "-h")
    with Job(tmp_path, REPORT, arguments=arguments) as job:
        code, stdout, _ = job.finish()
    assert code == 0
    assert [report["argv"] for report in reports(stdout).values()] == [list(arguments)] * 2


def test_standard_input_goes_to_the_first_rank_only(tmp_path: Path) -> None:
    with Job(tmp_path, "if rank == 0: ready(); wait()\n" + REPORT) as job:
        assert job.process.stdin is not None
        job.process.stdin.write(b"for rank 0")
        job.process.stdin.close()
        job.process.stdin = None
        shown = job.lines("stdout")
        of_1, of_0 = sorted([next(shown), next(shown)], key=lambda line: "ready" in line)
        assert reports(of_1)[1]["stdin"] == ""  # although rank 0 has read nothing yet
        let_go(int(of_0.split()[-1]))
        _, stdout, _ = job.finish()
    assert reports(stdout.replace(of_0, ""))[0]["stdin"] == "for rank 0"


def test_ranks_meet_at_the_port(tmp_path: Path) -> None:
    script = """
import socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(address)
    print(server.accept()[0].recv(100).decode())
else:
    while True:
        try:
            socket.create_connection(address, timeout=10).sendall(b"hello from rank 1")
            break
        except ConnectionRefusedError:
            pass
"""
    with Job(tmp_path, script) as job:
        assert job.finish() == (0, "[rank 0] hello from rank 1\n", "")


def test_a_module_runs_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    run = [sys.executable, "-m", "polyaccel", "run", "--nproc", "1", "--module", "package.train", "-x"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=True, text=True)
    assert done.stdout == "[rank 0] __main__ package ['-x']\n"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no core binding here")
def test_bound_ranks_share_the_cores(tmp_path: Path) -> None:
    script = "import json\nprint(json.dumps(sorted(os.sched_getaffinity(0))))"
    with Job(tmp_path, script, "--bind-cores") as job:
        _, stdout, _ = job.finish()
    cores = {rank: set(map(int, re.findall(r"\d+", text))) for rank, text in re.findall(r"rank (\d)\] (.*)", stdout)}
    assert cores["0"] | cores["1"] == os.sched_getaffinity(0)
    assert len(os.sched_getaffinity(0)) < 2 or not cores["0"] & cores["1"]


# Its lines are longer than pipes, and a rank may be late with the rest of one.
PATIENT = """
from polyaccel.cli.main import main
from polyaccel.launch import output
output._UNFINISHED_S = 1000.0
raise SystemExit(main())
"""


def test_concurrent_long_lines_stay_whole(tmp_path: Path) -> None:
    lines, width = 60, 100_000
    script = f"for i in range({lines}): print(i, str(rank) * {width}, file=[sys.stdout, sys.stderr][i % 2])"
    with Job(tmp_path, script, launcher=("-c", PATIENT)) as job:
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(job.lines("stderr")))
        reader.start()
        shown = {"stdout": list(job.lines("stdout")), "stderr": errors}
        reader.join()
        assert job.process.wait() == 0
    for parity, name in enumerate(("stdout", "stderr")):
        for rank in (0, 1):
            of_rank = [line for line in shown[name] if line.startswith(f"[rank {rank}] ")]
            assert of_rank == [f"[rank {rank}] {i} {str(rank) * width}\n" for i in range(parity, lines, 2)]
        assert len(shown[name]) == lines


def test_an_unfinished_line_is_shown_while_its_rank_waits(tmp_path: Path) -> None:
    script = """
if rank == 0:
    print("name? ", end="")
    print("hello", input())
"""
    with Job(tmp_path, script) as job:
        assert job.process.stdin is not None
        assert job.process.stdout is not None
        question = os.read(job.process.stdout.fileno(), 100)
        assert question == b"[rank 0] name? "
        job.process.stdin.write(b"Ada\n")
        job.process.stdin.flush()
        code, stdout, _ = job.finish()
    assert (code, stdout) == (0, "hello Ada\n")


def test_bytes_that_are_no_text_come_through(tmp_path: Path) -> None:
    # A carriage return would replace the bytes before it, as on a terminal.
    script = "sys.stdout.buffer.write(bytes({*range(256)} - {13}) + b'\\n')"
    with Job(tmp_path, script, nproc=1) as job:
        assert job.process.stdout is not None
        shown = job.process.stdout.read()
        assert job.process.wait() == 0
    assert shown.replace(b"[rank 0] ", b"") == bytes({*range(256)} - {13}) + b"\n"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for ranks, which are not our children")
def test_a_slow_reader_gets_all_of_it(tmp_path: Path) -> None:
    # More than our pipe holds, less than ours and the rank's do: the rank can end, and the launcher cannot yet.
    with Job(tmp_path, "ready()\nwait()\nif rank == 0: print('x' * 100_000)") as job:
        ranks, _ = job.pids()
        for pid in ranks:
            let_go(pid)
            assert wait_gone(pid)
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(timeout=0.5)
        code, stdout, _ = job.finish()
    assert code == 0
    assert stdout.count("x") == 100_000


def test_a_reader_that_goes_away_does_not_end_the_job(tmp_path: Path) -> None:
    script = """
ready()
if rank == 1:
    for i in range(1000): print("x" * 1000)
    print("all printed", file=sys.stderr)
"""
    with Job(tmp_path, script) as job:
        assert job.process.stdout is not None
        job.process.stdout.close()
        job.process.stdout = None
        code, _, stderr = job.finish()
    assert (code, stderr) == (0, "[rank 1] all printed\n")


def test_logs_hold_all_that_each_rank_wrote_in_every_run(tmp_path: Path) -> None:
    script = "print('out', rank); print('error', rank, file=sys.stderr)"
    for _ in range(2):
        with Job(tmp_path, script, "--log-dir", "logs/today") as job:
            assert job.finish()[0] == 0
    for rank in (0, 1):
        assert (tmp_path / f"logs/today/rank_{rank}.log").read_text() == f"out {rank}\nerror {rank}\n" * 2
    merged = (tmp_path / "logs/today/all.log").read_text().splitlines()
    assert sorted(merged) == sorted(
        2 * [f"[rank {rank}] {what} {rank}" for rank in (0, 1) for what in ("out", "error")]
    )


def test_the_log_of_all_ranks_says_why_the_job_ended(tmp_path: Path) -> None:
    with Job(tmp_path, "print('first')\nif rank == 0: sys.exit(7)", "--log-dir", "logs", nproc=1) as job:
        assert job.finish()[0] == 7
    first, *rest = (tmp_path / "logs/all.log").read_text().splitlines()
    assert first == "[rank 0] first"
    assert rest[0].startswith("polyaccel: rank 0 (pid ")


def test_a_log_directory_that_cannot_be_made_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Job(tmp_path, "ready()", "--log-dir", "file/logs") as job:
        code, stdout, stderr = job.finish()
    assert (code, stdout) == (1, "")
    assert "polyaccel: error: no log file file/logs/rank_0.log" in stderr
    assert "--log-dir" in stderr


def test_on_a_terminal_the_first_rank_owns_it_and_ctrl_c_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "sys.stdout.write(f'{sys.stdout.isatty()} {os.environ[\"RANK\"]}\\n')\n"  # one line at once
        "while True: signal.pause()\n"
    )
    keyboard, terminal = pty.openpty()

    # The terminal is its controlling one, as in a shell: Ctrl-C becomes SIGINT for the launcher's group only.
    def take_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", str(script)],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    try:
        shown = b""
        while shown.count(b"\n") < 2:
            shown += os.read(keyboard, 1000)
        assert sorted(shown.splitlines()) == [b"True 0", b"[rank 1] False 1"]
        os.write(keyboard, b"\x03")
        _, stderr = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()  # or another test is blamed for it
        os.close(keyboard)
        os.close(terminal)
    assert process.returncode == 128 + signal.SIGINT
    assert b"ended by SIGINT" in stderr
