"""Run a function once per rank, ranks being threads of this process: fast, deterministic, and it never hangs.

For tests, and for what writes checkpoints of many ranks' files in one process.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from threading import Condition, Thread
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.backends.local.backend import LocalCommunicator, LocalWorld
from polyaccel.comm.default import set_thread_communicator
from polyaccel.errors import CommTimeout

DEFAULT_TIMEOUT_S = 110.0  # for ranks that hang; one that compiles programs on a busy machine takes a minute
_GRACE_S = 20.0  # how long aborted ranks may take to end: one may be in the middle of a write to a slow disk
_HUNG_GRACE_S = 1.0  # the same of ranks that were given up


def run_threads(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    accelerator: Accelerator | None = None,
) -> list[Any]:
    """`[fn(communicator_of_rank_0, *args), ...]`, every rank in a thread whose default communicator is its own.

    The first exception of any rank is raised again with attribute `rank`, after the others were aborted and have ended.
    Ranks that are not done after `timeout_s` raise CommTimeout with the stack of each. `accelerator`
    is shared by all ranks; None means the CPU's.
    """
    world = LocalWorld(world_size, accelerator or host_accelerator(), timeout_s=timeout_s)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []
    running = set(range(world_size))
    changed = Condition()

    def play(communicator: LocalCommunicator) -> None:
        set_thread_communicator(communicator)
        try:
            results[communicator.rank] = fn(communicator, *args)
        except BaseException as error:
            with changed:
                failures.append(blame(error, communicator.rank))
            world.abort(f"rank {communicator.rank} failed: {type(error).__name__}: {error}", error)
        finally:
            with changed:
                running.discard(communicator.rank)
                changed.notify_all()

    threads = [
        Thread(target=play, args=(communicator,), name=f"rank {communicator.rank}", daemon=True)
        for communicator in world.communicators
    ]
    for thread in threads:
        thread.start()
    with changed:
        changed.wait_for(lambda: failures or not running, timeout_s)
        grace_s = _GRACE_S
        if not failures and running:
            failures.append(_hung(threads, sorted(running), timeout_s))
            world.abort(f"ranks {sorted(running)} were not done after {timeout_s:g} s")
            grace_s = _HUNG_GRACE_S
        changed.wait_for(lambda: not running, grace_s)
        ended = [thread for rank, thread in enumerate(threads) if rank not in running]
    for thread in ended:
        thread.join(_GRACE_S)  # until then its last frame holds what `fn` was called with
    if failures:
        raise failures[0]
    return results


def blame(error: BaseException, rank: int) -> BaseException:
    """`error` with the rank that raised it, as attribute `rank` and as a note under its traceback."""
    notes = [*getattr(error, "__notes__", ()), f"raised on rank {rank}"]
    error.__dict__.update(rank=rank, __notes__=notes)  # add_note is younger than Python 3.10
    return error


def _hung(threads: list[Thread], ranks: list[int], timeout_s: float) -> CommTimeout:
    stacks = "\n".join(_describe_stack(threads[rank], rank) for rank in ranks)
    return CommTimeout(
        f"ranks {ranks} were not done after {timeout_s:g} s; they stand at\n{stacks}",
        missing_ranks=ranks,
        hint="raise timeout_s if they were only slow",
    )


def _describe_stack(thread: Thread, rank: int) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)[-4:]) if frame else "  (just finished)\n"
    return f"rank {rank}:\n{stack}"
