"""The interfaces of a job's hosts: named once a host, and what looks like a slip is a sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from polyaccel.comm import host_address
from polyaccel.comm.base import Communicator
from polyaccel.comm.init import hosts as interfaces
from polyaccel.comm.init.hosts import InterfaceNote, name_interfaces, slips
from polyaccel.job.host_topology import HostTopology
from polyaccel.testkit.ranks.threads import run_threads


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([("a", "eth0", 10000, {}), ("b", "eth0", 10000, {"docker0": 0})], []),
        ([("a", "eth0", 0, {"ib0": 200000}), ("b", "eth0", 0, {})], []),  # nothing is known of the one that is used
        (
            [("a", "eth0", 1000, {}), ("b", "docker0", 0, {})],
            ["hosts talk by different network interfaces: a by eth0 (1 Gbit/s), b by docker0; if others are meant"],
        ),
        (
            [("a", "eth0", 10000, {}), ("b", "eth0", 100, {})],
            ["hosts talk by different network interfaces: a by eth0 (10 Gbit/s), b by eth0 (100 Mbit/s)"],
        ),
        (
            [("a", "eth0", 1000, {"ib0": 200000, "eth1": 25000}), ("b", "eth0", 1000, {})],
            ["a talks to other hosts by eth0 (1 Gbit/s), the way to the first rank's host, and has ib0 (200 Gbit/s)"],
        ),
    ],
)
def test_what_looks_like_a_slip_is_a_sentence(hosts: list[InterfaceNote], said: list[str]) -> None:
    found = list(slips(hosts))
    assert len(found) == len(said)
    assert all(sentence.startswith(beginning) for sentence, beginning in zip(found, said, strict=True))


def test_rank_0_names_each_host_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = [("a", "eth0", 1000, {}), ("a", "eth0", 1000, {}), ("b", "eth1", 1000, {})]

    def body(communicator: Communicator) -> None:
        note = notes[communicator.rank]

        class Noted:
            rank = communicator.rank

            def all_gather_object(self, value: object) -> list[Any]:
                return communicator.all_gather_object(note)

        name_interfaces(Noted(), HostTopology(communicator.rank, ((0, 1), (2,)), ("", "")))  # type: ignore[arg-type]

    with caplog.at_level(logging.INFO, logger=interfaces.__name__):
        run_threads(3, body)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "between hosts: a by eth0 (1 Gbit/s), b by eth1 (1 Gbit/s)"
    assert lines[1].startswith("hosts talk by different network interfaces: ")
    assert len(lines) == 2


def test_what_this_host_uses_is_what_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_address, "interfaces", lambda: {"eth7": "10.0.0.7", "ib0": "10.1.0.7"})
    monkeypatch.setattr(host_address, "named_addresses", lambda: ["10.1.0.7"])
    monkeypatch.setattr(Path, "read_text", lambda file: {"/sys/class/net/ib0/speed": "200000\n"}.get(str(file), "-1\n"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,ib0")
    assert interfaces._note()[1:] == ("eth7", 0, {"ib0": 200000})
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert interfaces._note()[1:] == ("ib0", 200000, {})
