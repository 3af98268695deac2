"""Jobs of `polyaccel run` over two hosts on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep

from ssh_hosts import SshHosts

_LIMIT_S = 120.0
_GONE_S = 60.0


class Hosts:
    """Two hosts, `host1` with two slots and `host2` with one, and jobs on them."""

    def __init__(self, up: SshHosts, folder: Path) -> None:
        self.up = up
        self.folder = folder
        (folder / "hosts").write_text("host1 slots=2\nhost2 slots=1\n")

    def command(self, script: Path, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
        """`polyaccel run` of a script over both hosts."""
        ssh = f"-F {self.up.ssh_config}"
        options = ("--hostfile", str(self.folder / "hosts"), "--launcher-args", ssh, *options)
        return [sys.executable, "-m", "polyaccel", "run", *options, str(script), *arguments]

    def run(
        self, script: Path, *options: str, arguments: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Such a job, once it has ended, begun with more variables."""
        return subprocess.run(
            self.command(script, *options, arguments=arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            cwd=script.parent,
            env={**os.environ, **(environment or {})},
        )

    def left(self) -> list[str]:
        """The processes on both hosts."""
        return [line for host in self.up.hosts for line in host.processes()]

    def wait_until_nothing_is_left(self) -> None:
        """Raises AssertionError when something is after a minute."""
        until = monotonic() + _GONE_S
        while left := self.left():
            assert monotonic() < until, left
            sleep(0.1)
