"""A process that kills this one when another process has ended: `end_with`, and `end_with_torchrun` for its ranks.

[Note: Guard process]
Ranks of polyaccel's launchers ask the kernel to die with what started them (`launch.process.end_with_parent`). torchrun
makes no such request. A rank of an agent that was killed continues while it waits in native code with the interpreter's
lock held, because none of its threads and handlers runs. It cannot make the request by itself either: the kernel means
the thread that started it, which may end before the agent, and a shell may stand between both. So the rank starts a
guard, which waits for the end of either process and needs nothing of them. It holds descriptors of both, not numbers,
which other processes get later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from logging import getLogger
from pathlib import Path

_log = getLogger(__name__)
_MARK = "TORCHELASTIC_RUN_ID"
"""The variable that the agent sets for its ranks, and does not have itself."""
_PROGRAM = """
import select, signal, sys
watched, guarded = map(int, sys.argv[1:])
both = select.poll()
both.register(watched, select.POLLIN)
both.register(guarded, select.POLLIN)
if guarded not in [descriptor for descriptor, _ in both.poll()]:
    signal.pidfd_send_signal(guarded, signal.SIGKILL)
"""


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """End this process with the torchrun agent that started it. Linux only; repeated calls do nothing."""
    if sys.platform == "linux" and _MARK in environ:
        with suppress(OSError):  # an ancestor has ended, and the ranks see that
            end_with(_agent_of(os.getpid()))


def end_with(process: int) -> None:
    """End this process with `process`. Linux only; repeated calls do nothing."""
    if sys.platform == "linux":
        _start_guard(process, os.getpid())


@cache
def _start_guard(watched: int, guarded: int) -> None:
    descriptors = list[int]()
    try:
        descriptors += [os.pidfd_open(watched), os.pidfd_open(guarded)]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # signals to the rank's group are not for it
        )
        guard.returncode = 0  # it outlives this process, which does not wait for it
    except OSError as error:  # an old kernel, or a limit on processes
        _log.debug("no guard watches process %d: %s", watched, error)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _agent_of(rank: int) -> int:
    """The nearest ancestor that is not part of the rank."""
    process = _parent_of(rank)
    with suppress(PermissionError):  # another user's
        while any(one.startswith(f"{_MARK}=".encode()) for one in _environment_of(process)):
            process = _parent_of(process)
    return process


def _environment_of(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")


def _parent_of(process: int) -> int:
    # The command's name stands in parentheses and may hold anything; then state and parent.
    return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
