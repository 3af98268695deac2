"""How ranks on two hosts talk: shared memory inside a host, gloo between them on the interface that leads there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_jobs import Hosts
from ssh_hosts import SshHost

from polyaccel.comm.benchmark import CollectiveTimings

SPY = Path(__file__).parents[2] / "support" / "jobs" / "spying_job.py"
LOUD = f"""
import logging, runpy
logging.basicConfig(level=logging.INFO)
runpy.run_path({str(SPY)!r}, run_name="__main__")
"""


def _trained(hosts: Hosts, lines: str, folder: Path, *options: str) -> tuple[list[float], str]:
    """The losses of a job on these hosts, and what it said beside."""
    (folder / "hosts").write_text(lines)
    (folder / "job.py").write_text(LOUD)
    done = hosts.run(folder / "job.py", "--hostfile", str(folder / "hosts"), *options, arguments=("train",))
    assert done.returncode == 0, done.stderr
    (line,) = (text for text in done.stdout.splitlines() if "FOUND " in text)
    losses: list[float] = json.loads(line.partition("FOUND ")[2])["losses"]
    return losses, done.stderr


def test_two_levels_train_as_one_level_does_and_as_one_host(two_hosts: Hosts, tmp_path: Path) -> None:
    both, said = _trained(two_hosts, "host1 slots=2\nhost2 slots=2\n", tmp_path)
    assert "process group of 4 ranks over shm+gloo" in said
    assert "between hosts: host1 by eth0 (10 Gbit/s), host2 by eth0 (10 Gbit/s)" in said
    flat, said = _trained(two_hosts, "host1 slots=2\nhost2 slots=2\n", tmp_path, "--export", "POLYACCEL_COMM=gloo")
    assert "process group of 4 ranks over gloo" in said
    one, said = _trained(two_hosts, "host2 slots=4\n", tmp_path)
    assert "process group of 4 ranks over shm " in said
    assert flat == one  # both add in rank order
    assert both == pytest.approx(one, rel=1e-6)
    assert both[2] < both[0]


@pytest.fixture
def with_a_bridge(two_hosts: Hosts, tmp_path: Path) -> Iterator[SshHost]:
    """The second host, whose name leads to an interface that nobody else reaches, as a container engine's."""
    host = two_hosts.up.hosts[1]
    names = tmp_path / "etc_hosts"
    names.write_text("127.0.0.1 localhost\n172.30.7.1 host2\n")
    steps = "ip link add docker7 type bridge && ip addr add 172.30.7.1/24 dev docker7 && ip link set docker7 up"
    done = host.run("sh", "-c", f"{steps} && mount --bind {names} /etc/hosts")
    assert done.returncode == 0, done.stderr
    try:
        yield host
    finally:
        host.run("sh", "-c", "umount /etc/hosts; ip link del docker7")


def test_an_interface_that_leads_nowhere_is_not_taken(with_a_bridge: SshHost, two_hosts: Hosts, tmp_path: Path) -> None:
    assert "172.30.7.1" in with_a_bridge.run("getent", "hosts", "host2").stdout
    losses, said = _trained(two_hosts, "host1 slots=1\nhost2 slots=1\n", tmp_path)
    assert "host2 by eth0 (10 Gbit/s)" in said
    assert losses[2] < losses[0]


def test_collectives_between_hosts_are_measured(two_hosts: Hosts, tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.json"
    quick = ("--largest", "4K", "--rounds", "3", "--budget", "0.01", "--json", str(speeds))
    where = ("--hosts", "host1:2,host2:2", "--launcher-args", f"-F {two_hosts.up.ssh_config}")
    command = [sys.executable, "-m", "polyaccel", "comm", "bench", *quick, *where]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    table = CollectiveTimings.read(speeds)
    assert (table.backend, table.ranks_on_hosts) == ("shm+gloo", (2, 2))
    assert len(done.stdout.splitlines()) == 2 + len(table.rows)
    assert two_hosts.left() == []
