"""Hosts as network namespaces with ssh servers, and links of a chosen rate between them: `brought_up`, `BenchHosts`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_BURST, _LATENCY = "512kb", "100ms"


@dataclass(frozen=True, slots=True)
class BenchHosts:
    """Hosts that are up: their names, the first one's address, and the file by which ssh finds them."""

    names: tuple[str, ...]
    address: str
    ssh_config: Path
    namespaces: tuple[str, ...]

    def limit(self, rate: str) -> None:
        """Limit what each host may send to a rate as tc writes it, for example 1gbit."""
        for namespace in self.namespaces:
            how = ["tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
            subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", *how], check=True)

    def options(self, slots: int, variables: dict[str, str]) -> list[str]:
        """Return the options of `polyaccel run` for `slots` ranks on each host with these variables."""
        variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(_ROOT), **variables}
        hosts = ",".join(f"{name}:{slots}" for name in self.names)
        exports = [word for name, value in variables.items() for word in ("--export", f"{name}={value}")]
        return ["--hosts", hosts, "--launcher-args", f"-F {self.ssh_config}", *exports]


@contextmanager
def brought_up(count: int) -> Iterator[BenchHosts]:
    """Bring up `count` hosts until the block is left. Exits where this is not possible."""
    sys.path.insert(0, str(_ROOT / "tests" / "support"))
    support: Any = import_module("ssh_hosts")
    if reason := support.why_absent():
        raise SystemExit(f"no hosts on this machine: {reason}")
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder, support.SshHosts(Path(folder), count) as up:
        names = tuple(host.name for host in up.hosts)
        known = Path(folder, "etc_hosts")
        known.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in up.hosts))
        for host in up.hosts:  # torchrun wants to look up its own host's name
            host.run("mount", "--bind", str(known), "/etc/hosts")
        namespaces = tuple(host.namespace for host in up.hosts)
        yield BenchHosts(names, up.hosts[0].address, up.ssh_config, namespaces)
