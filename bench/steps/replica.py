"""What a replica of each step costs: steps with it and without, in turn, in the same job.

`begins`: how long the step's end takes longer, for parameters are copied there; `waits`: how long the next update waits
for the rest; `in a thread`: how long that copies and computes checksums, beside the next forward and backward pass.
`sends`: how long that sends parts to neighbours then, and takes theirs, beside the whole next step (`--apart`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.machine import describe_machine
from bench.steps.cases import SHAPES, VARIANTS, Case, Job
from bench.steps.launch import figures_of
from bench.steps.sitting import positive
from bench.table import make_console, make_table
from polyaccel.job.auth import job_secret_from_env
from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
from polyaccel.job.memory_server.start import KeeperProcess

_LIMIT_S = 900.0
_MIB = 1 << 20
_IN_TURN = 3
"""Steps with replicas, then as many without."""


def main(argv: Sequence[str]) -> int:
    """`python -m bench replica`."""
    parser = argparse.ArgumentParser(prog="python -m bench replica", description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="29m", help="model (default: %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(default: %(default)s)")
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--ranks", type=positive, default=2, help="(default: %(default)s)")
    parser.add_argument("--turns", type=positive, default=6, help=f"of {_IN_TURN} steps each (default: %(default)s)")
    parser.add_argument(
        "--apart", action="store_true", help="each rank has a keeper of its own, as if it were on a host of its own"
    )
    args = parser.parse_args(argv)
    job = Job("pa1", Case(args.size, args.micro_batch, args.dtype, args.ranks), 3, args.turns, 0)
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        figures = _measure(job, Path(folder) / "figures.json", apart=args.apart)
    console = make_console()
    console.print(str(describe_machine()), markup=False)
    table = make_table(
        f"Replicas, {args.size}, AdamW, {args.dtype}, {args.ranks} ranks, medians of {_IN_TURN * args.turns} steps",
        ("step s without", "with", "more", "begins s", "waits s", "in a thread s", "sends s", "MiB a rank", "MiB/s"),
    )
    without, with_s = median(figures["without_s"]), median(figures["with_s"])
    begins_s, waits_s, thread_s = (median(figures[name]) for name in ("begins_s", "waits_s", "thread_s"))
    mib = figures["nbytes"] / _MIB
    table.add_row(
        f"{without:.3f}",
        f"{with_s:.3f}",
        f"{with_s / without - 1:+.1%}",
        f"{begins_s:.4f}",
        f"{waits_s:.4f}",
        f"{thread_s:.3f}",
        f"{median(figures['sends_s']):.3f}",
        f"{mib:.0f}",
        f"{mib / thread_s:,.0f}",
    )
    console.print(table)
    return 0


def _measure(job: Job, result: Path, *, apart: bool) -> dict[str, Any]:
    options = ["--nproc", str(job.case.world_size), "--restarts", "1"]
    arguments = [job.to_json(), str(result), *(["apart"] if apart else [])]
    figures: dict[str, Any] = figures_of(__spec__.name, arguments, result, options, _LIMIT_S)
    return figures


def train(job: Job, result: Path, *, apart: bool) -> None:
    """What every rank does."""
    if apart:
        keeper = KeeperProcess(job_secret_from_env(os.environ) or b"")
        os.environ[KEEPER_VARIABLE] = keeper.name
    import torch
    import torch.distributed as dist

    from bench.measure import PhaseClock
    from bench.steps.model import Gpt, draw_batch, load_corpus
    from bench.steps.trainers import build_trainer, load_library
    from polyaccel.checkpoint.in_memory.replicas import ReplicaPolicy, Replicas

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    variant = VARIANTS[job.variant]
    trainer: Any = build_trainer(job, variant, Gpt(SHAPES[job.case.size]), load_library(variant), job.case.world_size)
    corpus, clock, rank, engine = load_corpus(), PhaseClock(), dist.get_rank(), trainer._engine
    replicas = Replicas(engine.communicator, ReplicaPolicy(), {})
    took: dict[str, list[float]] = {
        name: [] for name in ("without_s", "with_s", "begins_s", "waits_s", "thread_s", "sends_s")
    }
    turn = 0

    def steps(name: str, count: int) -> None:
        nonlocal turn
        engine._replicas = replicas if name == "with_s" else None
        for _ in range(count):
            dist.barrier()
            began = perf_counter()
            trainer.step(*draw_batch(corpus, turn, rank, job.case.micro_batch), clock)
            took[name].append(perf_counter() - began)
            turn += 1
        replicas.settle()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                took[name].append(perf_counter() - began)

        return measured

    steps("with_s", job.warmup + 2)  # both images are there
    writer: Any = replicas._writer
    assert writer is not None
    replicas.replicate = timed("begins_s", replicas.replicate)  # type: ignore[method-assign]
    writer._finish = timed("thread_s", writer._finish)
    writer._exchange = timed("sends_s", writer._exchange)
    for times in took.values():
        times.clear()
    for _ in range(job.steps):
        steps("without_s", _IN_TURN)
        replicas.settle = timed("waits_s", Replicas.settle.__get__(replicas))  # type: ignore[method-assign]
        steps("with_s", _IN_TURN)
        took["waits_s"].pop()  # that after the last step
    if rank == 0:
        result.write_text(json.dumps({**took, "nbytes": writer._own.halves[0].image.nbytes}))
    replicas.close()
    engine._replicas = None
    dist.barrier()
    if apart:
        keeper.close()


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        sys.exit(main(sys.argv[1:]))
    train(Job.from_json(sys.argv[1]), Path(sys.argv[2]), apart=sys.argv[3:] == ["apart"])
