"""How long `import polyaccel` takes beside `import torch`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.machine import describe_machine
from bench.steps.sitting import positive
from bench.table import make_console, make_table

LIMIT = 0.1
"""What `import polyaccel` may take of the time of `import torch`."""
_MODULES = ("polyaccel", "torch")


def main(argv: Sequence[str]) -> int:
    """`python -m bench imports`. 1 if the limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench imports", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=7, help="fresh processes each (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the figures as a JSON line")
    args = parser.parse_args(argv)
    for module in _MODULES:
        import_s(module)  # compiles what has no bytecode yet, and brings files into memory
    seconds: dict[str, list[float]] = {module: [] for module in _MODULES}
    for _ in range(args.rounds):
        for module in _MODULES:
            seconds[module].append(import_s(module))
    ratio = median(seconds["polyaccel"]) / median(seconds["torch"])
    console, machine = make_console(), describe_machine()
    console.print(str(machine))
    table = make_table(f"Imports, {args.rounds} fresh processes each", ("import", "median ms", "min ms"))
    for module, values in seconds.items():
        table.add_row(module, f"{1e3 * median(values):.1f}", f"{1e3 * min(values):.1f}")
    console.print(table)
    verdict = "below" if ratio < LIMIT else "NOT BELOW"
    console.print(f"polyaccel / torch = {ratio:.3f}, {verdict} the limit of {LIMIT:g}")
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps({"import_s": seconds, "ratio": ratio, "machine": str(machine)}) + "\n")
    return 0 if ratio < LIMIT else 1


def import_s(module: str) -> float:
    """Seconds that `import module` takes in a fresh interpreter, without the interpreter's own start."""
    program = f"from time import perf_counter as now; t = now(); import {module}; print(now() - t)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)
