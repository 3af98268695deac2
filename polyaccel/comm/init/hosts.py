"""Which ranks share a host, and a communicator of two levels where that pays."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyaccel.comm import host_address
from polyaccel.comm.base import CommBackend, Communicator
from polyaccel.comm.discovery import GLOO_INTERFACE
from polyaccel.comm.init.backends import WITHIN_HOST, comm_backend
from polyaccel.comm.wrappers.hierarchical import is_two_level, two_level
from polyaccel.errors import CommError
from polyaccel.job.host_topology import HostTopology, host_id

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


def find_hosts(communicator: Communicator, local_rank: int) -> HostTopology:
    """Return which ranks share a host, by one all-gather; later code reads `Communicator.host_topology`."""
    try:
        own = host_id()
    except OSError:  # no Linux
        own = socket.gethostname()
    return HostTopology.of_notes(communicator.rank, communicator.all_gather_object((own, local_rank)))


def make_hierarchical(flat: Communicator, topology: HostTopology) -> Communicator:
    """Return `flat`, or shared memory inside equally large hosts. Collective; rank 0 logs why it stays flat."""
    within, hosts = comm_backend(WITHIN_HOST), topology.ranks_by_host
    sizes = [len(members) for members in hosts]
    if len(hosts) == 1 or set(sizes) == {1}:
        return flat
    reason = ""
    if not is_two_level(hosts):
        reason = f"the hosts have {', '.join(map(str, sizes))} ranks, and shared memory inside hosts needs equally many"
    elif within.most_ranks is not None and sizes[0] > within.most_ranks:
        reason = f"{sizes[0]} ranks on a host are more than {within.most_ranks}"
    else:
        probe = within.probe()
        reasons = flat.all_gather_object("" if probe.usable else probe.reason)
        reason = next((why for why in reasons if why), "")
    if not reason:
        intra, reason = _share(flat, within, hosts)
        if intra is not None and not reason:
            return two_level(flat, intra, hosts)
        if intra is not None:
            intra.close()
    if flat.rank == 0:
        _log.info("all ranks talk by %s: %s", flat.backend, reason)
    return flat


def _share(
    flat: Communicator, within: type[CommBackend], hosts: Sequence[Sequence[int]]
) -> tuple[Communicator | None, str]:
    """Shared memory for this host's ranks, and why some rank could not have it. Collective over all of `flat`."""
    near = None
    for host in hosts:
        near = flat.split(host) or near
    intra, failure = None, ""
    if near is None:
        raise CommError(f"rank {flat.rank} is on none of the hosts {list(hosts)}", value=hosts)
    try:
        intra = within().connect_within(near, flat.board())
    except CommError as error:
        failure = error.message
    failures = flat.all_gather_object(failure)
    near.close()  # not before all ranks have come here: some might still be connecting
    return intra, next((why for why in failures if why), "")
