"""The sentences about ranks that people read on standard error."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from polyaccel.launch.process import RankProcess

_HINTS: dict[int, str] = {
    signal.SIGKILL: "out of memory? check dmesg",
    signal.SIGSEGV: "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGABRT: "native code gave up; its reason is among the last lines",
    signal.SIGBUS: "shared memory or a disk full? check df /dev/shm",
    signal.SIGILL: "native code built for another processor?",
    signal.SIGFPE: "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
}


def name_rank(rank: RankProcess) -> str:
    """How messages name a rank."""
    return f"rank {rank.spec.rank} (pid {rank.pid})"


def signal_name(number: int) -> str:
    """SIGKILL for 9; a number without a name (real-time signals) as "signal 40"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(rank: RankProcess) -> str:
    """How a rank ended: "rank 1 (pid 123) was killed by SIGKILL after 12 s (out of memory? check dmesg)"."""
    code, after = rank.returncode or 0, f"after {_seconds(rank.lifetime_s)}"
    if code >= 0:
        return f"{name_rank(rank)} exited with code {code} {after}"
    hint = f" ({_HINTS[signum]})" if (signum := -code) in _HINTS else ""
    return f"{name_rank(rank)} was killed by {signal_name(signum)} {after}{hint}"


def describe_stop(rank: RankProcess, stop_timeout_s: float) -> str:
    """That a rank was stopped, and what will come of it."""
    limit = f"; the job ends in {_seconds(stop_timeout_s)} unless it is" if stop_timeout_s else ""
    return f"{name_rank(rank)} is stopped by {rank.stop_signal.name}; continue it with: kill -CONT {rank.pid}{limit}"


def with_last_lines(sentence: str, lines: Sequence[str]) -> str:
    """`sentence`, followed by what the rank wrote last, if anything is known."""
    if not lines:
        return sentence
    return f"{sentence}; its last lines:" + "".join(f"\n  | {line}" for line in lines)


def exit_code(returncode: int) -> int:
    """A process's return code as a shell gives it: 128 + N for signal N."""
    return returncode if returncode >= 0 else 128 - returncode


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
