"""Pick a free TCP port for the rendezvous store, outside the kernel's ephemeral range.

[Note: Free port choice]
The launcher picks the port and rank 0 binds it later, so that another process may take it in between. Ports that the
kernel hands out by itself, to outgoing connections and to a process that binds port 0, are taken all the time on a busy
machine; the others only by a process that asks for that very number. So the pick is a random one of the others that can
be bound just now, on every address family. Random, because two jobs that start together must not try the same numbers
in order.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from polyaccel.errors import LaunchError

_LOWEST = 15000
_HIGHEST = 65535
_ATTEMPTS = 200
_KERNEL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_IANA_RANGE = (49152, 65535)


def free_port(candidates: Sequence[int] | None = None) -> int:
    """Return a TCP port that can be bound, of `candidates` in random order. See [Note: Free port choice]."""
    ports = _non_ephemeral_ports() if candidates is None else candidates
    # A separate generator: a seeded script that starts jobs must not give all of them the same port.
    tried = random.SystemRandom().sample(ports, min(_ATTEMPTS, len(ports)))
    for port in tried:
        if is_free(port):
            return port
    raise LaunchError(
        f"none of {len(tried)} ports between {min(tried, default=0)} and {max(tried, default=0)} can be bound",
        hint="name a port that you may use: MASTER_PORT, or --master-port P of `polyaccel run`",
        value=tried,
    )


def is_free(port: int) -> bool:
    """Whether rank 0 could listen on `port` now, on IPv4 and, where the machine has it, on IPv6."""
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_ipv6:
        families.append((socket.AF_INET6, "::"))
    return all(_can_bind(family, address, port) for family, address in families)


def _can_bind(family: socket.AddressFamily, address: str, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # a Python with IPv6 on a kernel without
        return family == socket.AF_INET6
    with probe:
        # As servers do: connections of an earlier job that linger in TIME_WAIT do not make a port unusable.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return family == socket.AF_INET6 and not _is_taken(error)
    return True


def _is_taken(error: OSError) -> bool:
    """Whether binding failed because of the port, and not because the machine has no address of this family."""
    return error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


def _non_ephemeral_ports() -> Sequence[int]:
    """The ports that the kernel does not hand out by itself, or all when that leaves too few to choose from."""
    try:
        low, high = (int(word) for word in _KERNEL_RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        low, high = _IANA_RANGE
    quiet = [port for port in range(_LOWEST, _HIGHEST + 1) if not low <= port <= high]
    return quiet if len(quiet) >= _ATTEMPTS else range(_LOWEST, _HIGHEST + 1)
