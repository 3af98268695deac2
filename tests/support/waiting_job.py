"""A job over two hosts whose ranks wait, for tests that kill, stop and cut something of it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from host_jobs import Hosts

_RANKS = 3
_ENDED_S = 100.0
WAITS = """
import os, signal, sys
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write("there")
os.rename(os.path.join(sys.argv[1], os.environ["RANK"]), os.path.join(sys.argv[1], "rank" + os.environ["RANK"]))
signal.alarm(300)
signal.pause()
"""


def reset_signals() -> None:
    """Whatever started pytest may ignore some, and a launcher leaves ignored what it finds so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)


class WaitingJob:
    """A job over both hosts whose ranks wait; when the block is left both hosts are on the network again."""

    def __init__(self, hosts: Hosts, folder: Path, *options: str, launcher: str = "ssh") -> None:
        self.hosts = hosts
        self._folder = folder
        (folder / "train.py").write_text(WAITS)
        self.process = subprocess.Popen(
            hosts.command(
                folder / "train.py", "--grace-period", "2", *options, arguments=(str(folder),), launcher=launcher
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=hosts.environment,
            preexec_fn=reset_signals,
        )

    def __enter__(self) -> WaitingJob:
        while not all((self._folder / f"rank{rank}").exists() for rank in range(_RANKS)):
            assert self.process.poll() is None, self.process.communicate()
        assert len(self.hosts.left()) >= 5
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.up.hosts:
            host.heal()
        self.process.kill()
        self.process.communicate()

    def ended(self) -> tuple[int, str]:
        """The exit code and all that was said."""
        said, _ = self.process.communicate(timeout=_ENDED_S)
        return self.process.returncode, said
