"""Processes that receive weights: `tests/support/jobs/receiving_weights.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

JOB = Path(__file__).parent / "jobs" / "receiving_weights.py"


@contextmanager
def receiving(address: str, out: Path, how: str = "all") -> Iterator[subprocess.Popen[str]]:
    """A process that listens at `address`."""
    command = [sys.executable, str(JOB), address, str(out), how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield process
    finally:
        process.kill()
        process.communicate()
