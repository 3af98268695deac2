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

    def command(self, script: Path, *options: str, arguments: tuple[str, ...] = (), launcher: str = "ssh") -> list[str]:
        """`polyaccel run` of a script over both hosts."""
        if launcher == "ssh":
            options = ("--launcher-args", f"-F {self.up.ssh_config}", *options)
        options = ("--hostfile", str(self.folder / "hosts"), "--launcher", launcher, *options)
        return [sys.executable, "-m", "polyaccel", "run", *options, str(script), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """What `polyaccel run` gets: pdsh hands on options of ssh from there alone."""
        return {**os.environ, "PDSH_SSH_ARGS_APPEND": f"-F {self.up.ssh_config}"}

    def run(
        self,
        script: Path,
        *options: str,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        launcher: str = "ssh",
    ) -> subprocess.CompletedProcess[str]:
        """Such a job, once it has ended, begun with more variables."""
        return subprocess.run(
            self.command(script, *options, arguments=arguments, launcher=launcher),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            cwd=script.parent,
            env={**self.environment, **(environment or {})},
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
