"""`polyaccel run --launcher pdsh` over two hosts: one pdsh starts the agents, each by an ssh that reads a pipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from host_jobs import Hosts
from waiting_job import WaitingJob

from polyaccel.launch.remote.control_messages import BEAT_S, SILENCE_S

pytestmark = pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (Debian: apt install pdsh)")
NASTY = ("%n %h %%", "two words", "$HOME `id`", "a 'quote' and \"another\"", "new\nline", "", "-w", "日本")
SECRETS = {"HF_TOKEN": "hunter2-hunter2", "POLYACCEL_JOB_SECRET": "a-secret-of-this-very-job"}
SAID = """
import json, os, socket, sys
found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "TOKEN")]
print(json.dumps([*found, socket.gethostname(), sys.argv[1:]]))
"""
LOST = re.compile("host2: the agent.* or the connection to it,? is lost")
"""Silence or the end of the connection is noticed first, whichever comes first on this machine."""
FAILS = """
import os, signal, sys
if os.environ["RANK"] == "2":
    print("last words")
    sys.exit(77)
signal.pause()
"""


@pytest.fixture
def running(two_hosts: Hosts, tmp_path: Path) -> Iterator[WaitingJob]:
    with WaitingJob(two_hosts, tmp_path, launcher="pdsh") as job:
        yield job


def test_arguments_arrive_as_they_are(two_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAID)
    done = two_hosts.run(tmp_path / "train.py", "--export", "TOKEN=of mine", arguments=NASTY, launcher="pdsh")
    assert (done.returncode, done.stderr) == (0, "")
    said = sorted(json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines())
    places = [("0", "host1"), ("1", "host1"), ("2", "host2")]
    assert said == [[rank, "3", "of mine", host, list(NASTY)] for rank, host in places]
    assert two_hosts.left() == []


def test_the_code_of_the_first_failing_rank_arrives(two_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    done = two_hosts.run(tmp_path / "train.py", "--grace-period", "2", launcher="pdsh")
    assert done.returncode == 77
    assert "polyaccel: the part of the job on host2 failed: rank 2 (pid " in done.stderr
    assert "last words" in done.stdout
    assert two_hosts.left() == []


def test_secrets_travel_and_are_not_shown(two_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user may read arguments, here and there; the processes of all hosts are among those of this machine."""
    for name in SECRETS:
        monkeypatch.setenv(name, SECRETS[name])
    with WaitingJob(two_hosts, tmp_path, "--export", "HF_TOKEN", launcher="pdsh") as job:
        shown = [_read(file) for file in Path("/proc").glob("[0-9]*/cmdline")]
        ranks = two_hosts.up.hosts[1].run("pgrep", "-f", "train.py").stdout.split()
        found = two_hosts.up.hosts[1].run("cat", *(f"/proc/{pid}/environ" for pid in ranks)).stdout
        job.process.send_signal(signal.SIGTERM)
        _, said = job.ended()
    assert len([line for line in shown if b"remote.agent" in line]) >= 7  # pdsh, its shells and ssh, and both agents
    assert all(f"{name}={value}" in found for name, value in SECRETS.items())
    for value in SECRETS.values():
        assert all(value.encode() not in line for line in shown)
        assert value not in said


def test_a_signal_reaches_all_ranks(running: WaitingJob) -> None:
    running.process.send_signal(signal.SIGTERM)
    code, said = running.ended()
    assert code == 128 + signal.SIGTERM
    assert "SIGTERM is passed on to the ranks" in said
    assert running.hosts.left() == []


def test_a_launcher_that_is_killed_leaves_nothing_on_any_host(running: WaitingJob) -> None:
    running.process.kill()
    running.hosts.wait_until_nothing_is_left()


@pytest.mark.parametrize("name", ["pdsh", "ssh"])
def test_a_way_that_is_killed_ends_the_job(running: WaitingJob, name: str) -> None:
    (pdsh,) = _children(running.process.pid, "pdsh")
    os.kill(pdsh if name == "pdsh" else _ssh_of(pdsh), signal.SIGKILL)
    code, said = running.ended()
    assert code == (137 if name == "pdsh" else 255)
    assert "was killed by SIGKILL" in said if name == "pdsh" else "the agent, or the connection to it, is lost" in said
    running.hosts.wait_until_nothing_is_left()


def test_a_way_that_is_stopped_ends_the_job(running: WaitingJob) -> None:
    """pdsh has started it, so the launcher gets no signal; but no agent answers through it."""
    (pdsh,) = _children(running.process.pid, "pdsh")
    os.kill(_ssh_of(pdsh), signal.SIGSTOP)
    code, said = running.ended()
    assert code == 255
    assert LOST.search(said)
    running.hosts.wait_until_nothing_is_left()


def test_an_agent_that_is_killed_ends_the_job(running: WaitingJob) -> None:
    running.hosts.up.hosts[1].run("pkill", "-KILL", "-f", "polyaccel.launch.remote.agent")
    code, said = running.ended()
    assert code == 255
    assert LOST.search(said)
    running.hosts.wait_until_nothing_is_left()


def test_a_host_without_a_network_ends_the_job_on_both_sides(running: WaitingJob) -> None:
    running.hosts.up.hosts[1].cut()
    code, said = running.ended()
    assert code == 255
    assert LOST.search(said)
    running.hosts.wait_until_nothing_is_left()


def test_a_launcher_that_is_stopped_by_ctrl_z_is_not_lost(running: WaitingJob) -> None:
    running.process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, running.process.pid, os.WSTOPPED | os.WNOWAIT)
    sleep(SILENCE_S + BEAT_S)
    running.process.send_signal(signal.SIGCONT)
    sleep(BEAT_S)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    code, said = running.ended()
    assert code == 128 + signal.SIGINT, said
    assert running.hosts.left() == []


def _ssh_of(pdsh: int) -> int:
    """The ssh of a host: a child of one of pdsh's shells."""
    return _children(_children(pdsh, "sh")[-1], "ssh")[0]


def _children(pid: int, name: str) -> list[int]:
    command = ["pgrep", "-P", str(pid), "-f", f"^{name} "]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(word) for word in found.split()]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # that process has ended
        return b""
