"""A rank that waits in native code with the interpreter's lock held ends with what has started it all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from secrets import token_hex

import pytest
from launcher_job import Job, is_alive, wait_gone

from polyaccel.testkit.training.torch_launched import kill_marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

_STUCK = """
import ctypes, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("stuck", flush=True)
while True:
    ctypes.PyDLL(None).pause()  # keeps the interpreter's lock
"""
STUCK_RANK = "ready()\n" + _STUCK
_WAITS = """
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
_PARENT = f"""
import os, subprocess, sys
from polyaccel.launch.process import end_with_parent
child = subprocess.Popen([sys.executable, "-c", {_STUCK!r}], stdout=subprocess.PIPE, start_new_session=True,
                         preexec_fn=end_with_parent(os.getpid()))
{_WAITS}"""
_DAEMON = f"""
import os, subprocess, sys
from polyaccel.launch.base import Job
job = Job(command=(sys.executable, "-c", {_STUCK!r}), hosts={{"here": (0,)}},
          master_addr="127.0.0.1", master_port=29500)
child = subprocess.Popen([sys.executable, "-m", "polyaccel.launch.commands.task", "NUMBER"], stdout=subprocess.PIPE,
                         start_new_session=True, env=os.environ | {{"POLYACCEL_JOB": job.to_json(), "NUMBER": "0"}})
{_WAITS}"""
_RANK = f"""
import os
from polyaccel.job.process_guard import end_with_torchrun
end_with_torchrun(os.environ)
print(os.getpid(), flush=True)
{_STUCK}"""
_TORCHRUN = f"""
import os, subprocess, sys
child = subprocess.Popen(["sh", "-c", '"$0" -c "$1"; true', sys.executable, {_RANK!r}], stdout=subprocess.PIPE,
                         start_new_session=True, env=os.environ | {{"TORCHELASTIC_RUN_ID": "1"}})
pid = int(child.stdout.readline())
child.stdout.readline()
print(pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "parent_code", [_PARENT, _DAEMON, _TORCHRUN], ids=["process", "daemon of mpirun", "agent of torchrun"]
)
def test_a_child_ends_with_its_parent(parent_code: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
    finally:
        parent.kill()
        parent.communicate()
    assert wait_gone(child)


def test_workers_end_with_the_process_of_their_pool(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        f"import os\ndef wait(_):\n    print(os.getpid(), flush=True)\n    exec({_STUCK!r})"
    )
    code = """
from polyaccel.testkit.ranks.procs import RankPool
RankPool(1, backend="local").run("stuck:wait", timeout_s=600.0)
"""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pool = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ)
    try:
        assert pool.stdout is not None
        worker = int(pool.stdout.readline())
        assert pool.stdout.readline() == b"stuck\n"
    finally:
        pool.kill()
        pool.communicate()
    assert wait_gone(worker)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path, STUCK_RANK) as job:
        ranks, _ = job.pids()
        job.process.kill()
        assert all(map(wait_gone, ranks))


def test_what_a_checks_torchrun_has_left_is_killed() -> None:
    mark = token_hex(16)
    stuck = subprocess.Popen(
        [sys.executable, "-c", _STUCK],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "POLYACCEL_CHECK_ID": mark},
    )
    try:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == b"stuck\n"
        kill_marked(mark)
        assert stuck.wait(30) == -signal.SIGKILL
    finally:
        stuck.kill()
        stuck.communicate()
