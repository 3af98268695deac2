"""Causal attention of one sequence over two ranks, forward and backward: ours by shared memory and by gloo, keys and
values gathered by torch, DeepSpeed's Ulysses, and one process with two threads that has it whole."""

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
_WORKER = str(Path(__file__).with_name("worker.py"))
_LIMIT_S = 300.0
_NEAR = 1e-4
_OURS = {"ulysses, shm": ("ulysses", "shm"), "ring, shm": ("ring", "shm"), "ulysses, gloo": ("ulysses", "gloo")}
_OURS |= {"ring, gloo": ("ring", "gloo")}


def main(argv: Sequence[str]) -> int:
    """`python -m bench sequence`. 1 if some way computed other numbers."""
    parser = argparse.ArgumentParser(prog="python -m bench sequence", description=__doc__)
    parser.add_argument("--length", type=positive, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=5, help="measured in each launch (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="launches of each (default: %(default)s)")
    parser.add_argument("--deepspeed", type=Path, metavar="PYTHON", help="an environment with DeepSpeed")
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()))
    names = ["whole, one process", *_OURS, "gathered by torch, gloo"]
    if args.deepspeed is not None:
        names.append("DeepSpeed, gloo")
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            taken[name].append(measure(name, args.length, args.steps, args.deepspeed))
    wanted = taken["whole, one process"][0]["checked"]
    table = make_table(
        f"causal attention, {args.length} tokens, two ranks of a thread each, fp32, forward and backward",
        ("way", "median ms", "least ms", "CPU ms of rank 0", "notes"),
    )
    is_wrong = False
    for name, runs in taken.items():
        ms = [1e3 * run["seconds"] for run in runs]
        wrong = any(abs(run["checked"] / wanted - 1) > _NEAR for run in runs)
        is_wrong |= wrong
        cpu_ms = 1e3 * median(run["cpu_seconds"] for run in runs)
        table.add_row(name, f"{median(ms):.0f}", f"{min(ms):.0f}", f"{cpu_ms:.0f}", "WRONG" if wrong else "")
    console.print(table)
    return int(is_wrong)


def measure(name: str, length: int, steps: int, deepspeed: Path | None) -> dict[str, float]:
    """What rank 0 measured of one launch of the way called `name`."""
    way, backend = _OURS.get(name, (name.split()[0].strip(",").lower(), "gloo"))
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "result.json")
        arguments = [_WORKER, str(result), way, str(length), str(steps)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        if way == "whole":
            start, environ["OMP_NUM_THREADS"] = [sys.executable, *arguments], "2"
        elif name in _OURS:
            start = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", *arguments]
            environ |= {"POLYACCEL_COMM": backend, "DS_ACCELERATOR": "cpu"}
        else:
            python = deepspeed if way == "deepspeed" and deepspeed is not None else Path(sys.executable)
            start = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
            environ |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": ""}
        job = subprocess.run(start, cwd=folder, env=environ, capture_output=True, text=True, timeout=_LIMIT_S)
        if not result.exists():
            raise SystemExit(f"{name} gave no figures:\n{job.stdout}{job.stderr}")
        found: dict[str, float] = json.loads(result.read_text())
        return found
