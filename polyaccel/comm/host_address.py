"""This host's addresses, from the socket library alone: no command is run and nothing is sent."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

_log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
_IPV6_FILE = Path("/proc/net/if_inet6")
_GLOBAL, _HOST = 0x00, 0x10
"""Scopes of addresses in that file; others hold on one link, and mean nothing without their interface."""
_ANY_PORT = 9
_ELSEWHERE = "192.0.2.1"  # an unassigned address (RFC 5737), to which nothing is sent
_BACKLOG = 4096  # ranks that come at once; the system takes less where it allows less


def address_facing(peer: str) -> str | None:
    """Return this host's address on the way to `peer`; None without a route."""
    try:
        found = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, where in sorted(found, key=lambda one: one[0] is not socket.AF_INET):
        with suppress(OSError), socket.socket(family, kind) as way:
            way.connect(where)
            return str(way.getsockname()[0])
    return None


def means_this_host(address: str) -> bool:
    """Whether `address` is the loopback by its number or its standard name: on every host it leads to that host."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens on `port` of this host's `address`, and of all its addresses where that is none of them.

    Many hosts call themselves by a loopback address where others call them by a real one, so a name that leads to the
    loopback here counts as none of this host's. Raises OSError when the port is taken or the name leads nowhere.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, kind, _, _, where in sorted(found, key=lambda one: one[0] is not socket.AF_INET):
        if means_this_host(str(where[0])) and not means_this_host(address):
            continue
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            continue
        return listener
    _log.info("%s is not an address of this host: rank 0 listens on port %d of all interfaces", address, port)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def loopback_interface() -> str | None:
    """The name of the loopback's network interface; None where there is none or it cannot be found."""
    return next((name for name, found in _all_interfaces().items() if any(map(means_this_host, found))), None)


def interfaces() -> dict[str, str]:
    """Return each interface's address by name, IPv4 first, without loopback. Linux only, else empty."""
    return {name: found[0] for name, found in _all_interfaces().items() if not means_this_host(found[0])}


def _all_interfaces() -> dict[str, list[str]]:
    """The addresses of each interface: IPv4, then those of IPv6 that lead to other networks too."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            found[name] = [socket.inet_ntoa(answer[20:24])]
    with suppress(OSError):  # a kernel without IPv6
        for line in _IPV6_FILE.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) in (_GLOBAL, _HOST):
                found.setdefault(name, []).append(str(IPv6Address(bytes.fromhex(digits))))
    return found


def own_addresses() -> tuple[str, ...]:
    """The addresses by which other hosts may reach this one."""
    present = sorted(interfaces().values(), key=lambda address: ":" in address)
    return tuple(present) or tuple(a for a in named_addresses() if not means_this_host(a))


def interface_facing(peer: str) -> str | None:
    """The network interface on the way to `peer`; None where there is none or it cannot be found."""
    facing = address_facing(peer)
    if facing is None or means_this_host(facing):
        return None
    first = next((name for name, address in interfaces().items() if address == facing), None)
    return first or next((name for name, found in _all_interfaces().items() if facing in found), None)


def interface_between_hosts(master: str) -> str | None:
    """The network interface by which this host and that of rank 0, at `master`, reach each other; None where it cannot
    be found.

    That is the one on the way there. Where the way leads to the loopback, because this is that host and calls itself
    so, it is the only interface, or the one on the way to anywhere.
    """
    if means_this_host(master):  # hosts of their launcher's, all of them here
        return loopback_interface()
    present = interfaces()
    facing = interface_facing(master)
    if facing is not None or len(present) < 2:
        return facing or next(iter(present), None)
    return interface_facing(_ELSEWHERE)


def start_of(process: int | str) -> int:
    """Return a process's start in ticks since boot, which distinguishes it from a later one of that id. Linux only."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])


def is_running(process: int, start: int) -> bool:
    """Return whether the process of this id that started then still runs, zombies excluded. Linux only."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == start


def named_addresses() -> list[str]:
    """The addresses that this host's name leads to."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname_ex(name)[2]
    except OSError:
        pass
    try:  # a name that has addresses of IPv6 alone
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET6)))
    except OSError:
        return []
