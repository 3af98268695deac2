"""The launcher's end of the keeper: starts it before the first rank, and lets it end after the last attempt."""

from __future__ import annotations

import secrets
import select
import subprocess
import sys
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.launch.keeper.process import READY

# Isolated: no file of the folder that the launcher was started in stands in for a module of Python.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from polyaccel.launch.keeper.process import main
main(sys.argv)
"""
_START_S = 60.0
_SHARE_OF_MEMORY = 0.75
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def can_keep() -> bool:
    """Whether this system has what a keeper needs: sockets and memory without names."""
    return sys.platform == "linux"


class KeeperProcess:
    """A keeper that lives as long as this process, or until `close`, however often ranks are started."""

    def __init__(self, secret: bytes, limit_nbytes: int | None = None) -> None:
        """`limit_nbytes`: the most that it keeps; None is three quarters of the memory that this process may use.
        Raises LaunchError when it cannot be started."""
        self.name = f"polyaccel-keeper-{secrets.token_hex(16)}"
        self._secret = secret
        self._limit_nbytes = limit_nbytes or int(_SHARE_OF_MEMORY * _memory_nbytes())
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).parents[3])
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, package, self.name, str(self._limit_nbytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # the interrupt from a keyboard is the launcher's to pass on
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._secret.hex().encode() + b"\n")
            ready, _, _ = select.select([process.stdout], [], [], _START_S)
            if not ready or process.stdout.read(len(READY)) != READY:
                process.kill()
                raise OSError(f"it has ended with code {process.wait()}" if ready else "it does not answer")
        except OSError as error:
            raise LaunchError(
                f"the keeper of replicas could not be started: {error}",
                cure="see whether memory or a limit on processes (ulimit -u) is missing",
            ) from error
        return process

    def ensure(self) -> bool:
        """Start it again, empty, if somebody has killed it. Whether that was so. Raises LaunchError."""
        if self._process.poll() is None:
            return False
        self._let_go()
        self._process = self._start()
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Let it end, with all that it keeps."""
        self._process.kill()
        self._let_go()

    def _let_go(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def _memory_nbytes() -> int:
    """The memory of this host, or what a control group leaves of it to this process."""
    found = [int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()[:1]]
    for limit in _CGROUP_LIMITS:
        try:
            found.append(int(limit.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found)
