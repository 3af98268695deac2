"""This host's addresses, from the socket library alone: no command is run and nothing is sent."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def address_facing(peer: str) -> str | None:
    """The address of this host on the way to `peer` (an address or a name); None where there is no way.

    Connecting a datagram socket only chooses the route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((peer, _ANY_PORT))
        except OSError:
            return None
        return str(way.getsockname()[0])


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by name; loopback left out. Linux only, else empty."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def own_addresses() -> tuple[str, ...]:
    """The addresses by which other hosts may reach this one."""
    return tuple(interfaces().values()) or tuple(a for a in _named() if not a.startswith("127."))


def is_named() -> bool:
    """Whether this host's name leads to an address by which other hosts may reach it."""
    return any(not address.startswith("127.") for address in _named())


def interface_facing(peer: str) -> str | None:
    """The network interface on the way to `peer`; None where there is none or it is not known."""
    facing = address_facing(peer)
    return next((name for name, address in interfaces().items() if address == facing), None)


def host_name() -> str:
    """An identity that processes share which can open each other's files: the running system, its view of processes.
    Linux only."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _named() -> list[str]:
    try:
        return socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        return []
