"""What it costs to notice what users do to parameters and gradients: its share of a step in which they do nothing.

Timed inside the ranks: the looks for changed parameters (the page map where ranks share them, version counters
elsewhere), for unfrozen ones and for gradients that were written to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.machine import describe_machine
from bench.measure import PhaseClock
from bench.steps.cases import SHAPES, VARIANTS, Case, Job
from bench.steps.launch import rank_environment
from bench.steps.sitting import positive
from bench.table import make_console, make_table

LIMIT = 0.002
"""The share of a step that this may take."""
_RANKS = 2
_LIMIT_S = 600.0
_MEMORY = {"shared": {}, "of its own": {"POLYACCEL_SHM_SYMMETRIC": "0"}}
_ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    """`python -m bench ownership`. 1 if the limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench ownership", description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="29m", help="model (default: %(default)s)")
    parser.add_argument("--micro-batch", type=positive, default=1, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="measured (default: %(default)s)")
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()), markup=False)
    table = make_table(
        f"Noticing changes, {args.size}, micro-batch {args.micro_batch}, fp32, {_RANKS} ranks, medians",
        ("stage, memory of a rank", "step s", "noticing ms", "share"),
    )
    worst = 0.0
    for memory, environ in _MEMORY.items():
        for stage in range(4):
            job = Job(f"pa{stage}", Case(args.size, args.micro_batch, "fp32", _RANKS), 3, args.steps, 0)
            steps = _measure(job, environ)
            share = median(noticing / step for step, noticing in steps)
            worst = max(worst, share)
            step_s, noticing_s = (median(values) for values in zip(*steps, strict=True))
            table.add_row(f"{stage}, {memory}", f"{step_s:.4f}", f"{1e3 * noticing_s:.3f}", f"{100 * share:.3f} %")
    console.print(table)
    console.print(f"the worst is {'below' if worst < LIMIT else 'NOT BELOW'} {100 * LIMIT:g} % of a step")
    return 0 if worst < LIMIT else 1


def _measure(job: Job, environ: dict[str, str]) -> list[tuple[float, float]]:
    """Seconds of each step of rank 0, and of noticing in it."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "steps.json")
        ranks = str(job.case.world_size)
        command = [sys.executable, "-m", "polyaccel", "run", "--nproc", ranks, "--module", __spec__.name]
        subprocess.run(
            [*command, job.to_json(), str(result)],
            cwd=_ROOT,
            env=rank_environment() | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=_LIMIT_S,
        )
        return [(step, noticing) for step, noticing in json.loads(result.read_text())]


def train(job: Job, result: Path) -> None:
    """What every rank does."""
    import torch

    from bench.steps.model import Gpt, draw_batch, load_corpus
    from bench.steps.trainers import build_trainer, load_library

    torch.set_num_threads(1)
    variant = VARIANTS[job.variant]
    library = load_library(variant)
    spent = _watched()
    rank = library.comm.get_rank()
    trainer = build_trainer(job, variant, Gpt(SHAPES[job.case.size]), library, job.case.world_size)
    corpus, clock = load_corpus(), PhaseClock()
    steps = []
    for step in range(job.warmup + job.steps):
        batch = draw_batch(corpus, step, rank, job.case.micro_batch)
        began, before = perf_counter(), spent[0]
        trainer.step(*batch, clock)
        steps.append((perf_counter() - began, spent[0] - before))
    if rank == 0:
        result.write_text(json.dumps(steps[job.warmup :]))
    library.comm.barrier()


def _watched() -> list[float]:
    """One number, the seconds that this process has spent in noticing from now on."""
    from polyaccel.torch.sharding.gradients import GradientAccess
    from polyaccel.torch.sharding.module_adapter import TorchAdapter
    from polyaccel.torch.sharding.ownership import OwnedParameters

    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                return function(*args, **named)
            finally:
                spent[0] += perf_counter() - began

        return call

    for owner, names in (
        (TorchAdapter, ("changed_params", "has_unfrozen")),
        (OwnedParameters, ("check_trained", "on_update")),
        (GradientAccess, ("note_writes", "forget")),
    ):
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))
    return spent


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        sys.exit(main(sys.argv[1:]))
    train(Job.from_json(sys.argv[1]), Path(sys.argv[2]))
