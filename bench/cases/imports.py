"""Time of `import polyaccel` and of `import torch` in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from statistics import median

from bench.measure import interleave
from bench.runner import OUT, Option, begin, parse, record, say, table

LIMIT = 0.1
"""What `import polyaccel` may take of the time of `import torch`."""


def main(argv: Sequence[str]) -> int:
    """Return 1 if the limit is missed."""
    args = parse("imports", __doc__ or "", {"rounds": Option(7, "fresh processes each"), "out": OUT}, argv)
    begin()
    seconds = interleave({module: partial(import_s, module) for module in ("polyaccel", "torch")}, args.rounds)
    rows = [(name, f"{1e3 * median(each):.1f}", f"{1e3 * min(each):.1f}") for name, each in seconds.items()]
    table(f"Imports, {args.rounds} fresh processes each", ("import", "median ms", "min ms"), rows)
    ratio = median(seconds["polyaccel"]) / median(seconds["torch"])
    say(f"polyaccel / torch = {ratio:.3f}, {'below' if ratio < LIMIT else 'NOT BELOW'} the limit of {LIMIT:g}")
    record(args.out, "imports", seconds)
    return int(ratio >= LIMIT)


def import_s(module: str) -> float:
    """Return the seconds of an import in a fresh interpreter, without the interpreter's own start."""
    program = f"from time import perf_counter as now; t = now(); import {module}; print(now() - t)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)
