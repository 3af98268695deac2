"""A step of transformers' Trainer with our `deepspeed` and with DeepSpeed's: the same script, turn and turn about.

Ours is installed into a folder of this run, before the packages of this environment; DeepSpeed's needs an environment
of its own, with the same torch and transformers. Both start under torchrun with one thread a rank.
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
from typing import Any

from rich.table import Table

from bench.machine import describe_machine
from bench.steps.sitting import listed, one_of, positive
from bench.table import make_console, make_table

_ROOT = Path(__file__).resolve().parents[2]
_JOB = Path(__file__).with_name("job.py")
_LIMIT_S = 600.0
_WHO = ("ours", "DeepSpeed")


def main(argv: Sequence[str]) -> int:
    """`python -m bench trainer`."""
    parser = argparse.ArgumentParser(prog="python -m bench trainer", description=__doc__)
    parser.add_argument("--deepspeed", type=Path, required=True, metavar="PYTHON", help="of an environment that has it")
    parser.add_argument(
        "--dtype", type=listed(one_of(("fp32", "bf16"))), default="fp32,bf16", help="(default: %(default)s)"
    )
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="(default: %(default)s)")
    parser.add_argument("--micro-batch", type=positive, default=1, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=9, help="9 are 29 M parameters (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="measured (default: %(default)s)")
    parser.add_argument("--warmup", type=positive, default=3, help="steps before that (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the runs as JSON lines")
    given = parser.parse_args(argv)
    console = make_console()
    console.print(f"{describe_machine()}, load {os.getloadavg()[0]:.1f}", markup=False)
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        site = Path(folder, "site")
        install(site)
        runs = hold(
            given, dict(zip(_WHO, ((Path(sys.executable), site), (given.deepspeed, None)), strict=True)), Path(folder)
        )
    console.print(f"load {os.getloadavg()[0]:.1f} at the end", markup=False)
    if given.out is not None:
        with given.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(run) + "\n" for run in runs)
    console.print(figures(runs))
    return 0


def figures(runs: Sequence[dict[str, Any]]) -> Table:
    """Medians over the steps of all rounds, how much faster ours is, and how far the losses are apart at the worst."""
    title = "Trainer, two ranks"
    table = make_table(title, ("dtype", "ours, ms", "DeepSpeed, ms", "speed", "best, ms", "losses apart"))
    for dtype in dict.fromkeys(run["dtype"] for run in runs):
        seconds: dict[str, list[float]] = {who: [] for who in _WHO}
        losses: dict[str, list[float]] = {}
        for run in runs:
            if run["dtype"] == dtype:
                seconds[run["who"]] += run["seconds"]
                losses[run["who"]] = run["losses"]
        ours, theirs = (median(seconds[who]) * 1e3 for who in _WHO)
        best = " and ".join(f"{min(seconds[who]) * 1e3:.0f}" for who in _WHO)
        apart = max(abs(a - b) / b for a, b in zip(losses[_WHO[0]], losses[_WHO[1]], strict=True))
        table.add_row(dtype, f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}", best, f"{apart:.1e}")
    return table


def install(site: Path) -> None:
    """Our package into the folder `site`, from the sources here."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    source = str(_ROOT / "plugins" / "polyaccel-deepspeed")
    subprocess.run([*command, "--no-build-isolation", "--target", str(site), source], check=True, timeout=_LIMIT_S)


def hold(given: argparse.Namespace, packages: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """All runs; each round begins with another package."""
    runs = []
    for index in range(given.rounds):
        for dtype in given.dtype:
            names = list(packages) if index % 2 == 0 else list(reversed(packages))
            for who in names:
                python, site = packages[who]
                found = run_job(given, dtype, python, site, folder / f"{index}-{dtype}-{who}.json")
                found["seconds"] = found["seconds"][given.warmup :]
                runs.append({"who": who, "dtype": dtype, "round": index, **found})
                took = f"{median(found['seconds']) * 1e3:.0f} ms a step"
                print(f"round {index + 1}, {dtype}, {who} ({found['deepspeed']}): {took}", flush=True)
    return runs


def run_job(given: argparse.Namespace, dtype: str, python: Path, site: Path | None, out: Path) -> dict[str, Any]:
    """What rank 0 of one run measured. Raises CalledProcessError with its last lines, if it fails."""
    command = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(_JOB)]
    options = {
        "stage": given.stage,
        "micro-batch": given.micro_batch,
        "dtype": dtype,
        "layers": given.layers,
        "out": out,
    }
    steps = ["--steps", str(given.warmup + given.steps)]
    path = f"{python.parent}:{os.environ['PATH']}"  # DeepSpeed compiles with the ninja that stands there
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [*command, *steps, *(word for name, value in options.items() for word in (f"--{name}", str(value)))],
        env=environment, capture_output=True, text=True, timeout=_LIMIT_S,
    )  # fmt: skip
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
        done.check_returncode()
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found
