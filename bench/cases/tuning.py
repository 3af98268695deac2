"""Choice of the tuner next to an exhaustive search, and predictions next to measurements.

Every setting of the search is measured, in two rounds: one before the tuner runs and one after it, in the opposite
order. The tuner runs as `polyaccel tune` does, with a limit of memory and of trials. Its choice is compared with the
best of all, and its predictions with the shortest step of both rounds and the highest RSS of a rank. The figures of an
interrupted run stay in `--folder`, and the next one continues.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.runner import MIB, ROOT, Option, begin, parse, rank_environment, say, table
from bench.sizes import SHAPES
from polyaccel.cli.plan.command import parse_size
from polyaccel.config import load_config, resolve_config
from polyaccel.planner.autotune.candidates import Candidate, candidates
from polyaccel.planner.autotune.cost_model import CostEstimate
from polyaccel.planner.autotune.records import TrialLog, TrialRecord
from polyaccel.planner.autotune.trials import TrialPlan, run_trial
from polyaccel.planner.autotune.tuned_job import TunedJob, tune_job
from polyaccel.planner.autotune.tuner import TuneResult, best_of

_RANKS = 2
_WHERE = ("--nproc", str(_RANKS), "--grace-period", "1")
_TIME_BOUND, _MEMORY_BOUND = 0.15, 0.10
Pair = tuple[CostEstimate, TrialRecord]
"""A setting as it was predicted and measured."""


def main(argv: Sequence[str]) -> int:
    """Return 1 if the tuner's choice is 5 % or more slower than the best of all."""
    options = {
        "size": Option("29m", "model", SHAPES),
        "limit": Option("1G", "memory of a rank"),
        "batch": Option(16, "samples of a step"),
        "steps": Option(3, "measured of each setting"),
        "rounds": Option(2, "before and after the tuner", (1, 2)),
        "folder": Option("build/bench-tuning", "where figures stay"),
    }
    args = parse("tuning", __doc__ or "", options, argv)
    os.environ.update(rank_environment())
    begin()
    limit, folder = parse_size(args.limit), Path(args.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(folder, args.size, limit, args.batch, args.steps)
    every = candidates(resolve_config(load_config(plan.config_tree), world_size=_RANKS), _RANKS, is_remote=False)
    rounds = [measured(every, plan, folder / "round1")]
    job = TunedJob(config_file=plan.config_file, command=plan.command, world_size=_RANKS, where=_WHERE)
    answer, _ = tune_job(job, {"results_dir": str(folder / "tuned")})
    if args.rounds == 2:
        rounds.append(measured(every[::-1], plan, folder / "round2"))
    pairs, rows = paired(answer, rounds), []
    for predicted, one in sorted(pairs, key=lambda pair: pair[1].step_s or 0.0):
        off, sizes = errors((predicted, one)), (predicted.device_nbytes, one.peak_nbytes or 0)
        times = f"{predicted.step_s:.3f}", f"{one.step_s:.3f}", f"{100 * off[0]:+.0f} %"
        rows.append((str(one.candidate), *times, *(f"{size / MIB:.0f}" for size in sizes), f"{100 * off[1]:+.0f} %"))
    columns = ("setting", "predicted s", "step s", "off by", "predicted MiB", "MiB", "off by")
    table(f"{args.size}, {args.batch} samples a step, {_RANKS} ranks", columns, rows)
    line, slower = verdict(pairs, answer, limit)
    say(line)
    return int(slower is None or slower >= 0.05)


def make_plan(folder: Path, size: str, limit: int, batch: int, steps: int) -> TrialPlan:
    """Return how every setting is measured: stages, micro-batches and recomputation, 32 settings of 16 samples."""
    tree = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "autotuning": {
            "memory_limit": limit,
            "tuner_num_trials": 8,
            "tuner_early_stopping": 0,
            "margin": 0.5,
            "start_profile_step": 2,
            "end_profile_step": 1 + steps,
            "trial_timeout": 300.0,
        },
    }
    config = folder / "config.json"
    config.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    script = str(ROOT / "bench" / "tuned.py")
    return TrialPlan(
        command=(sys.executable, "-m", "polyaccel", "run", *_WHERE, script, str(config), size),
        config_file=str(config),
        config_tree=tree,
        train_batch_size=batch,
        first_step=2,
        last_step=1 + steps,
        limit_s=300.0,
        mapped={},
    )


def measured(every: Sequence[Candidate], plan: TrialPlan, folder: Path) -> list[TrialRecord]:
    """Measure each setting once, except those that the folder has already."""
    log = TrialLog(folder, json.dumps([plan.config_tree, plan.command]), overwrite=True)
    found = {record.candidate for record in log.records}
    for number, candidate in enumerate(every, 1):
        if candidate not in found:
            record, _ = run_trial(plan, candidate, folder / "trial")
            log.add(record)
            figures = f"{record.step_s:.3g} s, {(record.peak_nbytes or 0) / MIB:.0f} MiB" if record.is_good else ""
            say(f"{folder.name}, {number} of {len(every)}: {candidate}: {figures or record.failure}")
    return list(log.records)


def paired(answer: TuneResult, rounds: Sequence[Sequence[TrialRecord]]) -> list[Pair]:
    """Return each prediction with the shortest step and the highest peak of all rounds, without what failed in all."""
    pairs = []
    for each in answer.estimates:
        good = [one for records in rounds for one in records if one.candidate == each.candidate and one.is_good]
        if good:
            step_s, peak = min(one.step_s or 0.0 for one in good), max(one.peak_nbytes or 0 for one in good)
            pairs.append((each, replace(good[0], step_s=step_s, peak_nbytes=peak)))
    return pairs


def errors(pair: Pair) -> tuple[float, float]:
    """Return the relative errors of time and memory."""
    predicted, one = pair
    times = (predicted.step_s or 0.0) / (one.step_s or 1.0) - 1
    return times, predicted.device_nbytes / (one.peak_nbytes or 1) - 1


def verdict(pairs: Sequence[Pair], answer: TuneResult, limit: int) -> tuple[str, float | None]:
    """Return the figures that count in words, and the share by which the choice is slower than the best."""
    lines = []
    for what, bound, number in (("step times", _TIME_BOUND, 0), ("memory", _MEMORY_BOUND, 1)):
        off = [abs(errors(pair)[number]) for pair in pairs]
        middle, most, within = median(off or [0.0]), max(off, default=0.0), sum(error <= bound for error in off)
        spread = f"the median off by {middle:.1%}, the worst by {most:.1%}"
        lines.append(f"Predicted {what}: {within} of {len(off)} within {bound:.0%}, {spread}.")
    best, choice = best_of([one for _, one in pairs], limit), answer.best and answer.best.candidate
    ours = next((one for _, one in pairs if one.candidate == choice), None)
    if best is None or ours is None:
        return "\n".join(lines), None
    slower = (ours.step_s or 0.0) / (best.step_s or 1.0) - 1
    lines.append(
        f"The tuner's choice after {len(answer.records)} trials, {ours.candidate}, takes {ours.step_s:.3f} s a step: "
        f"{slower:.1%} more than the best of all below {limit / MIB:.0f} MiB, {best.candidate} with {best.step_s:.3f} s"
    )
    return "\n".join(lines), slower
