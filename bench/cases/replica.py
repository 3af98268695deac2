"""Cost of a replica of each step: steps with it and without, in turn, in the same job.

`begins`: what the end of the step takes longer, because parameters are copied there; `waits`: the wait of the next
update for the rest; `in a thread`: copies and checksums there, during the next forward and backward pass. `sends`: the
exchange of parts with neighbours, during the whole next step (`--apart`: each rank has a separate keeper, as if it were
on another host).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

from bench.runner import MIB, Case, Column, Option, Runs, Settings, Start
from bench.sizes import SHAPES

_IN_TURN = 3
"""Steps with replicas, then as many without."""
_TIMES = ("without_s", "with_s", "begins_s", "waits_s", "thread_s", "sends_s")


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the one launch, in which both take turns."""
    return {"replica": Start(args.ranks, options=("--nproc", str(args.ranks), "--restarts", "1"))}


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns, medians of rank 0."""

    def of(name: str, digits: int = 3) -> Column:
        return lambda own, found: f"{median(own.every(name)):.{digits}f}"

    def nbytes(own: Runs) -> float:
        return float(own.values("nbytes")[0]) / MIB

    def more(own: Runs) -> float:
        return float(median(own.every("with_s")) / median(own.every("without_s")) - 1)

    return {
        "step s without": of("without_s"),
        "with": of("with_s"),
        "more": lambda own, found: f"{more(own):+.1%}",
        "begins s": of("begins_s", 4),
        "waits s": of("waits_s", 4),
        "in a thread s": of("thread_s"),
        "sends s": of("sends_s"),
        "MiB a rank": lambda own, found: f"{nbytes(own):.0f}",
        "MiB/s": lambda own, found: f"{nbytes(own) / median(own.every('thread_s')):,.0f}",
    }


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train in turns; return the seconds of each, and the bytes of a rank's replica."""
    keeper: Any = None
    if s["apart"]:
        from polyaccel.job.auth import job_secret_from_env
        from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
        from polyaccel.job.memory_server.start import KeeperProcess

        keeper = KeeperProcess(job_secret_from_env(os.environ) or b"")
        os.environ[KEEPER_VARIABLE] = keeper.name
    import torch.distributed as dist

    from bench.cases.steps import build_trainer, load_library
    from bench.training import Gpt, draw_batch, load_corpus
    from polyaccel.checkpoint.in_memory.replicas import ReplicaPolicy, Replicas

    dist.init_process_group("gloo")
    trainer = build_trainer("pa1", s, Gpt(s["size"]), load_library("pa1"))
    corpus, rank, engine = load_corpus(), dist.get_rank(), trainer.subject
    replicas: Any = Replicas(engine.communicator, ReplicaPolicy(), {})
    took: dict[str, list[float]] = {name: [] for name in _TIMES}
    steps = 0

    def train(name: str, count: int) -> None:
        nonlocal steps
        engine._replicas = replicas if name == "with_s" else None
        for _ in range(count):
            dist.barrier()
            timed(name, trainer.step)(*draw_batch(corpus, steps, rank, s["micro_batch"]))
            steps += 1
        replicas.settle()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                took[name].append(perf_counter() - began)

        return run

    train("with_s", 5)  # now both images exist
    writer = replicas._writer
    replicas.replicate = timed("begins_s", replicas.replicate)
    writer._finish = timed("thread_s", writer._finish)
    writer._exchange = timed("sends_s", writer._exchange)
    for times in took.values():
        times.clear()
    for _ in range(s["turns"]):
        train("without_s", _IN_TURN)
        replicas.settle = timed("waits_s", Replicas.settle.__get__(replicas))
        train("with_s", _IN_TURN)
        took["waits_s"].pop()  # that after the last step
    nbytes = writer._own.halves[0].image.nbytes
    replicas.close()
    engine._replicas = None
    dist.barrier()
    if keeper is not None:
        keeper.close()
    return {**took, "nbytes": nbytes}


_OPTIONS = {
    "size": Option("29m", "model", SHAPES),
    "dtype": Option("fp32", "type", ("fp32", "bf16")),
    "micro_batch": Option(4, "sequences a rank"),
    "ranks": Option(2, "ranks"),
    "turns": Option(6, f"of {_IN_TURN} steps each"),
    "apart": Option(False, "give each rank a separate keeper, as if it were on another host"),
}
_TITLE = "Replicas, {size}, AdamW, {dtype}, {ranks} ranks, medians"
CASES = {"replica": Case("replica", __doc__ or "", _OPTIONS, variants, columns, _TITLE, rounds=1)}
