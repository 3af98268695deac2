"""The end of a process with process groups of torch.

[Note: Gloo thread shutdown]
A thread of gloo reports that a collective is done, and only then releases its tensors. Where it holds the last
reference to Python's objects, it needs the interpreter's lock for that; Python ends a thread that asks for it while the
interpreter ends, and C++ aborts the process for it: "terminate called without an active exception", one time in many on
a busy machine, after all work was done. So before the interpreter ends, every such thread has come to rest: it sleeps
where it waits for the next collective, or for a rank that will not come.
"""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_RESTING = "S"  # of proc_pid_stat(5): it waits, and for nothing that ends by itself
_LIMIT_S = 5.0
_LOOK_AGAIN_S = 0.001
_LOOKS = 3


@cache
def join_gloo_threads_at_exit() -> None:
    """Let this process, when it ends, wait until gloo's threads have released what they were given."""
    atexit.register(wait_for_rest)


def wait_for_rest(limit_s: float = _LIMIT_S) -> bool:
    """Wait until every thread of gloo rests, at most so long. Returns whether all do.

    The interpreter's lock is free between looks: one that waits for it sleeps as well, and has moved on at the next.
    Where the system does not report threads, a moment is all there is.
    """
    ends_s = time.monotonic() + limit_s
    at_rest = 0
    while at_rest < _LOOKS:
        time.sleep(_LOOK_AGAIN_S)
        at_rest = at_rest + 1 if all(state == _RESTING for state in _states()) else 0
        if time.monotonic() > ends_s:
            return False
    return True


def _states() -> list[str]:
    """The state of each thread of gloo, as the system calls it."""
    states = []
    with suppress(OSError):
        for thread in os.listdir(_THREADS):
            with suppress(OSError):  # it has ended just now
                name, _, rest = (_THREADS / thread / "stat").read_text(errors="replace").rpartition(")")
                if name.endswith(f"({_NAME}"):
                    states.append(rest.split()[0])
    return states
