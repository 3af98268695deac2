"""Ranks that are threads, as if they were on several hosts."""

from __future__ import annotations

import pytest

from polyaccel.comm.base import Communicator
from polyaccel.comm.wrappers import hierarchical
from polyaccel.comm.wrappers.hierarchical import HierarchicalCommunicator, two_level

Hosts = tuple[tuple[int, ...], ...]


def on_hosts(comm: Communicator, hosts: Hosts) -> HierarchicalCommunicator:
    """`comm` with its ranks on these hosts."""
    intra = None
    for members in hosts:
        intra = comm.split(members) or intra
    assert intra is not None
    return two_level(comm, intra, hosts)


def pass_on_up_to(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all-to-alls of no longer parts be passed on, however many ranks a host has."""

    def short_nbytes(ranks: int, *, is_uneven: bool) -> int:
        return nbytes

    monkeypatch.setattr(hierarchical, "_short_nbytes", short_nbytes)
