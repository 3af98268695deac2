"""Two hosts on one machine, as far as networks and names go: namespaces with a cable between them.

They share everything else: files, process ids, /dev/shm. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

AGENT = """#!/bin/sh
# AGENT [-option...] HOST COMMAND...: as ssh would
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
name={prefix}${{host##*.}}
exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$name" "$*"
"""


@dataclass(frozen=True)
class FakeHosts:
    """The addresses, on an interface `eth0`, and the program that starts commands on them. Names lead nowhere."""

    addresses: tuple[str, str]
    agent: Path

    def command(self, host: int, command: list[str]) -> list[str]:
        """`command`, started on a host."""
        return [str(self.agent), self.addresses[host], shlex.join(command)]


def why_no_hosts() -> str:
    """Why there can be no such hosts here; empty if they can be tried."""
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    return "needs root" if os.geteuid() else f"{' and '.join(missing)} not installed" if missing else ""


@contextmanager
def two_hosts(folder: Path) -> Iterator[FakeHosts]:
    """Raises CalledProcessError where the kernel allows no namespaces."""
    network, prefix = f"10.213.{os.getpid() % 256}", f"pa{os.getpid()}-"
    agent = folder / "agent"
    agent.write_text(AGENT.format(prefix=prefix))
    agent.chmod(0o755)
    names = [f"{prefix}{number}" for number in (1, 2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"{network}.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield FakeHosts((f"{network}.1", f"{network}.2"), agent)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
