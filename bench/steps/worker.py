"""What every rank of a job does: `python -m bench.steps.worker JOB RESULT` under a launcher.

JOB is a `Job` as JSON; rank 0 writes the `Run` as JSON to the file RESULT.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import CpuTime, PhaseClock, minor_faults, read_memory, reset_peak
from bench.steps.cases import SHAPES, VARIANTS, Job, RankMemory, Run
from bench.steps.model import Corpus, Gpt, draw_batch, load_corpus
from bench.steps.trainers import Trainer, build_trainer, load_library


def main(argv: list[str]) -> None:
    job, result = Job.from_json(argv[0]), Path(argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")  # also for the bookkeeping of this script
    try:
        report = measure(job)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        if dist.get_rank() == 0:
            result.write_text(json.dumps(asdict(combine(job, reports))))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure(job: Job) -> dict[str, Any]:
    """Train; returns what this rank saw, for `combine`."""
    variant = VARIANTS[job.variant]
    library = load_library(variant)
    corpus = load_corpus()
    base = read_memory()
    model = Gpt(SHAPES[job.case.size])
    param_numel = sum(parameter.numel() for parameter in model.parameters())
    began = perf_counter()
    trainer = build_trainer(job, variant, model, library, dist.get_world_size())
    initialise_s = perf_counter() - began
    del model  # FSDP2 and the engines hold what they need of it
    setup = read_memory()
    reset_peak()
    dist.barrier()
    figures = train(job, trainer, corpus)
    end = read_memory()
    dist.barrier()  # PSS divides pages by the processes that have them now
    memory = RankMemory(base.rss_nbytes, setup.rss_nbytes, end.peak_nbytes, end.rss_nbytes, end.pss_nbytes)
    estimate = trainer.estimate_nbytes()
    return {**figures, "param_numel": param_numel, "initialise_s": initialise_s, "memory": memory, "estimate": estimate}


def train(job: Job, trainer: Trainer, corpus: Corpus) -> dict[str, Any]:
    """Warm up, then measure each step."""
    rank = dist.get_rank()
    clock, step_s, losses, faults = PhaseClock(), list[float](), list[float](), list[int]()
    before = CpuTime.now()
    for step in range(job.warmup + job.steps):
        if step == job.warmup:
            clock, before = PhaseClock(), CpuTime.now()
        tokens, targets = draw_batch(corpus, step, rank, job.case.micro_batch)
        faults_before, began = minor_faults(), perf_counter()
        losses.append(trainer.step(tokens, targets, clock))
        step_s.append(perf_counter() - began)
        faults.append(minor_faults() - faults_before)
    after = CpuTime.now()
    return {
        "step_s": step_s[job.warmup :],
        "losses": losses,
        "faults": faults[job.warmup :],
        "phase_s": {phase: seconds / job.steps for phase, seconds in clock.seconds.items()},
        "wall_s": after.wall_s - before.wall_s,
        "machine_s": after.machine_s - before.machine_s,
        "process_s": after.process_s - before.process_s,
    }


def combine(job: Job, reports: list[dict[str, Any]]) -> Run:
    """One run from what its ranks saw."""
    first = reports[0]
    ranks_s = sum(report["process_s"] for report in reports)
    return Run(
        job=job,
        param_numel=first["param_numel"],
        step_s=tuple(fmean(step) for step in zip(*(report["step_s"] for report in reports), strict=True)),
        losses=tuple(fmean(step) for step in zip(*(report["losses"] for report in reports), strict=True)),
        phase_s=first["phase_s"],
        cpu_s=ranks_s / len(reports) / job.steps,
        minor_faults=median(fault for report in reports for fault in report["faults"]),
        initialise_s=max(report["initialise_s"] for report in reports),
        other_cpus=max(0.0, (first["machine_s"] - ranks_s) / first["wall_s"]),
        memory=tuple(report["memory"] for report in reports),
        estimate_nbytes=first["estimate"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
