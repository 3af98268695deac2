"""Comm backends beside each other, as the engine uses them: latency at 4 KiB, bandwidth at 64 MiB, and the copy.

Each backend runs two ranks of its own, one backend after another, round after round. What is in no environment of ours
(another MPI, oneCCL) is measured in the one that is named for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.machine import describe_machine
from bench.steps.sitting import positive
from bench.table import make_console, make_table

_ROOT = Path(__file__).resolve().parents[2]
_OPS = ("all-reduce", "reduce-scatter", "all-gather")
_LIMIT_S = 120.0
_MIB_64 = 64 << 20


def main(argv: Sequence[str]) -> int:
    """`python -m bench backends`."""
    parser = argparse.ArgumentParser(prog="python -m bench backends", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="launches of each (default: %(default)s)")
    what = "a backend in another environment: mpi=PYTHON, ccl=PYTHON; may be repeated, with a name: MPICH:mpi=PYTHON"
    parser.add_argument("--also", action="append", default=[], metavar="[NAME:]BACKEND=PYTHON", help=what)
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()))
    ways = {"shm": ("shm", Path(sys.executable)), "gloo": ("gloo", Path(sys.executable))}
    for also in args.also:
        label, _, python = also.partition("=")
        name, _, backend = label.rpartition(":")
        ways[name or backend] = (backend, Path(python))
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, (backend, python) in ways.items():
            taken[name].append(measure(backend, python))
    table = make_table(
        f"2 ranks, fp32, medians of {args.rounds} launches",
        ("backend", *(f"4 KiB {op}, us" for op in _OPS), *(f"64 MiB {op}, GB/s" for op in _OPS)),
    )
    every = [seconds for runs in taken.values() for seconds in runs]
    for name, runs in taken.items():
        table.add_row(name, *_cells(runs, _OPS))
    table.add_row("copy", *_cells(every, ("copy",) * len(_OPS)))
    console.print(table)
    return 0


def measure(backend: str, python: Path) -> dict[str, float]:
    """Seconds of each case on rank 0 of two, in the environment of `python`."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "result.json")
        worker = ["-m", "bench.collectives.backend_worker", str(result)]
        if backend == "mpi":
            start = [str(python.with_name("mpirun")), "-n", "2", str(python), *worker]
        else:
            start = [str(python), "-m", "polyaccel", "run", "--nproc", "2", "--module", *worker[1:]]
        environ = {**os.environ, "POLYACCEL_COMM": backend, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environ |= {"PYTHONPATH": str(_ROOT), "PATH": f"{python.parent}{os.pathsep}{environ['PATH']}"}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        job = subprocess.run(start, cwd=_ROOT, env=environ, capture_output=True, text=True, timeout=_LIMIT_S)
        if not result.exists():
            raise SystemExit(f"{backend} in {python} gave no figures:\n{job.stdout}{job.stderr}")
        seconds: dict[str, float] = json.loads(result.read_text())
        return seconds


def _cells(runs: Sequence[dict[str, float]], ops: Sequence[str]) -> list[str]:
    small = [f"{1e6 * median(run[f'4 KiB {op}'] for run in runs):.1f}" for op in ops]
    return small + [f"{_MIB_64 / median(run[f'64 MiB {op}'] for run in runs) / 1e9:.1f}" for op in ops]
