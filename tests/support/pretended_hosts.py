"""Ranks that are threads, as if they were on several hosts."""

from __future__ import annotations

from polyaccel.comm.base import Communicator
from polyaccel.comm.wrappers.hierarchical import HierarchicalCommunicator, two_level

Hosts = tuple[tuple[int, ...], ...]


def on_hosts(comm: Communicator, hosts: Hosts) -> HierarchicalCommunicator:
    """`comm` with its ranks on these hosts."""
    intra = None
    for members in hosts:
        intra = comm.split(members) or intra
    assert intra is not None
    return two_level(comm, intra, hosts)
