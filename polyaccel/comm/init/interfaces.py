"""The network interfaces by which the hosts of a job talk: named at the start, and compared."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyaccel.comm import host_address
from polyaccel.comm.base import Communicator
from polyaccel.comm.discovery import GLOO_INTERFACE
from polyaccel.job.host_topology import HostTopology

_log = logging.getLogger(__name__)

InterfaceNote = tuple[str, str, int, dict[str, int]]
"""A host's name, the interface that its ranks use, and the speed of that and of its others in Mbit/s; 0: unknown."""


def name_interfaces(communicator: Communicator, topology: HostTopology) -> None:
    """Let rank 0 log which interface each host uses, and what looks like a slip. Collective over all hosts' ranks."""
    notes = communicator.all_gather_object(_note())
    if communicator.rank == 0:
        hosts = [notes[ranks[0]] for ranks in topology.ranks_by_host]
        _log.info("between hosts: %s", ", ".join(_shown(note) for note in hosts))
        for sentence in slips(hosts):
            _log.warning("%s", sentence)


def slips(hosts: Sequence[InterfaceNote]) -> Iterator[str]:
    """A sentence where hosts use interfaces of different names or speeds, and for each host with a faster one."""
    speeds = {speed for _, _, speed, _ in hosts if speed}
    if len({name for _, name, _, _ in hosts}) > 1 or len(speeds) > 1:
        shown = ", ".join(_shown(note) for note in hosts)
        yield (
            f"hosts talk by different network interfaces: {shown}; if others are meant, export {GLOO_INTERFACE} on each"
        )
    for host, name, speed, others in hosts:
        fastest = max(others, key=lambda other: others[other], default="")
        if fastest and 0 < speed < others[fastest]:
            yield (
                f"{host} talks to other hosts by {name} ({_speed(speed)}), the way to the first rank's host, and has "
                f"{fastest} ({_speed(others[fastest])}): to use that, export {GLOO_INTERFACE}={fastest} there and "
                "name the first host by its address on that network (--master-addr)"
            )


def _note() -> InterfaceNote:
    present = host_address.interfaces()
    used = os.environ.get(GLOO_INTERFACE, "").partition(",")[0]
    if not used:  # gloo takes the one that this host's name leads to
        named = host_address.named_addresses()
        used = next((name for name, address in present.items() if address in named), "")
    others = {name: megabits for name in present if name != used and (megabits := _megabits(name))}
    return socket.gethostname(), used or "its own interface choice", _megabits(used) if used else 0, others


def _megabits(interface: str) -> int:
    """Return an interface's speed as the system reports it; 0 if unknown."""
    try:
        return max(0, int(Path(f"/sys/class/net/{interface}/speed").read_text()))
    except (OSError, ValueError):
        return 0


def _shown(note: InterfaceNote) -> str:
    host, name, speed, _ = note
    return f"{host} by {name} ({_speed(speed)})" if speed else f"{host} by {name}"


def _speed(megabits: int) -> str:
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"
