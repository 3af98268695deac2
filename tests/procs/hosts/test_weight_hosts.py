"""Weights of three ranks on two hosts, to a receiver on one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from host_jobs import Hosts

from polyaccel.job.auth import SECRET_VARIABLE

JOBS = Path(__file__).parents[2] / "support" / "jobs"
SECRET = "a secret of these tests"
TRANSFERS = 6


def test_ranks_on_two_hosts_send_many_times_in_the_same_groups(two_hosts: Hosts, tmp_path: Path) -> None:
    server = two_hosts.up.hosts[1]
    address = f"tcp://{server.address}:29610"
    job = [sys.executable, str(JOBS / "receiving_weights.py"), address, str(tmp_path / "out"), str(TRANSFERS)]
    command = server.entered("env", f"{SECRET_VARIABLE}={SECRET}", *job)
    receiver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout is not None
        assert [receiver.stdout.readline() for _ in range(2)] == ["listening\n", f"{address}\n"]
        options = ("--export", f"{SECRET_VARIABLE}={SECRET}")
        arguments = (address, str(TRANSFERS))
        done = two_hosts.run(JOBS / "sending_weights_job.py", *options, arguments=arguments)
        assert done.returncode == 0, done.stderr
        received = [float(receiver.stdout.readline()) for _ in range(TRANSFERS)]
    finally:
        receiver.kill()
        receiver.communicate()
    (line,) = (text for text in done.stdout.splitlines() if "FOUND " in text)
    ranks, identities, sums = json.loads(line.partition("FOUND ")[2])
    assert (ranks, identities) == (3, 1)
    assert received == pytest.approx(sums, rel=1e-9)
    assert len(set(sums)) == TRANSFERS
