"""Hosts that have addresses of IPv6 alone meet, and train as others do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from host_jobs import Hosts
from ssh_hosts import SshHosts, why_absent

from polyaccel.job.ports import free_port

_LIMIT_S = 120.0
SUMS = """
import json, os, socket, torch, polyaccel.comm as comm
comm.init_distributed(timeout=60)
value = torch.tensor([float(comm.get_rank() + 1)])
comm.all_reduce(value)
print(json.dumps([value.item(), os.environ["MASTER_ADDR"], socket.gethostname()]), flush=True)
"""


@pytest.fixture(scope="module")
def ipv6_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = why_absent()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts6")
    with SshHosts(folder, 2, ipv6=True) as up:
        yield Hosts(up, folder)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SUMS)
    return tmp_path / "train.py"


def _said(stdout: str) -> list[tuple[float, str, str]]:
    return [tuple(json.loads(line[line.index("[", 1) :])) for line in stdout.splitlines() if line.endswith('"]')]


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_ranks_of_hosts_reached_by_ssh_meet(launcher: str, ipv6_hosts: Hosts, script: Path) -> None:
    done = ipv6_hosts.run(script, launcher=launcher)
    assert done.returncode == 0, done.stderr
    said = _said(done.stdout)
    assert {value for value, _, _ in said} == {6.0}
    assert {address for _, address, _ in said} == {ipv6_hosts.up.hosts[0].address}
    assert sorted(name for _, _, name in said) == ["host1", "host1", "host2"]


def test_hosts_that_are_given_the_command_meet(ipv6_hosts: Hosts, script: Path) -> None:
    first, port = ipv6_hosts.up.hosts[0].address, str(free_port())
    where = ["--hosts", "host1:1,host2:1", "--master-addr", first, "--master-port", port]
    with ExitStack() as stack:
        jobs = []
        for number, host in enumerate(ipv6_hosts.up.hosts):
            command = [sys.executable, "-m", "polyaccel", "run", *where, "--node-rank", str(number), str(script)]
            command = host.entered(f"--wd={script.parent}", *command)
            job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(job.kill)
            jobs.append(job)
        ends = [(job.communicate(timeout=_LIMIT_S), job.returncode) for job in jobs]
    assert [code for _, code in ends] == [0, 0], ends
    assert {value for (out, _), _ in ends for value, _, _ in _said(out)} == {3.0}
