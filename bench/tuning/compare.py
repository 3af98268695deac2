"""What the tuner chooses beside an exhaustive search, and what it foretells beside what is measured.

Every setting of the search is measured, in two rounds: one before the tuner runs and one after it, in the opposite
order, so that a clock that drifts does not favour those of one end. The tuner runs as `polyaccel tune` does, with a
limit of memory and of trials, and knows nothing of the rounds. Its choice is compared with the best of all, and what it
foretold in the end with what was measured: seconds of the shortest step of both rounds, and the most memory that any
rank's process had resident. The figures of a bench that was stopped stay in --folder, and the next one goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from rich.table import Table

from bench.machine import describe_machine
from bench.steps.cases import SHAPES
from bench.steps.launch import rank_environment
from bench.table import make_console, make_table
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
_TRIALS, _MARGIN = 8, 0.5
_TIME_BOUND, _MEMORY_BOUND = 0.15, 0.10
_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """A setting as it was foretold and measured."""

    foretold: CostEstimate
    measured: TrialRecord

    @property
    def time_error(self) -> float:
        return (self.foretold.step_s or 0.0) / (self.measured.step_s or 1.0) - 1

    @property
    def memory_error(self) -> float:
        return self.foretold.device_nbytes / (self.measured.peak_nbytes or 1) - 1


def main(argv: Sequence[str]) -> int:
    """`python -m bench tuning`. 1 where the tuner's choice is 5 % or more slower than the best of all."""
    parser = argparse.ArgumentParser(
        prog="python -m bench tuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="29m", help="(default: %(default)s)")
    parser.add_argument("--limit", type=parse_size, default=1 << 30, help="memory of a rank (default: 1G)")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="measured of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, choices=(1, 2), default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=22.0, help="after which the second round ends (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/bench-tuning"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    os.environ.update(rank_environment())
    console = make_console()
    console.print(str(describe_machine()))
    began = monotonic()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    tree = _config(args)
    plan = _plan(tree, args)
    every = candidates(resolve_config(load_config(tree), world_size=_RANKS), _RANKS, is_remote=False)
    rounds = [_measured(every, plan, args.folder / "round1", None)]
    answer = _tuned(plan, args.folder)
    if args.rounds == 2:
        rounds.append(_measured(every[::-1], plan, args.folder / "round2", began + 60 * args.minutes))
    rows = _rows(answer, rounds)
    console.print(_table(rows, args))
    console.print(_verdict(rows, answer, args.limit))
    console.print(f"It took {(monotonic() - began) / 60:.0f} minutes.")
    best, ours = best_of([row.measured for row in rows], args.limit), _again(rows, answer)
    return 0 if best is not None and ours is not None and (ours.step_s or 0) < 1.05 * (best.step_s or 0) else 1


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """What is tuned: stages, micro-batches and recomputation, 32 settings of 16 samples."""
    return {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "autotuning": {
            "memory_limit": args.limit,
            "tuner_num_trials": _TRIALS,
            "tuner_early_stopping": 0,
            "margin": _MARGIN,
            "start_profile_step": 2,
            "end_profile_step": 1 + args.steps,
            "trial_timeout": 300.0,
        },
    }


def _plan(tree: dict[str, Any], args: argparse.Namespace) -> TrialPlan:
    """How every setting is measured, by the tuner and beside it."""
    config = args.folder / "config.json"
    config.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    script = str(_ROOT / "bench" / "tuning" / "train.py")
    return TrialPlan(
        command=(sys.executable, "-m", "polyaccel", "run", *_WHERE, script, str(config), args.size),
        config_file=str(config),
        config_tree=tree,
        train_batch_size=args.batch,
        first_step=2,
        last_step=1 + args.steps,
        limit_s=300.0,
        mapped={},
    )


def _tuned(plan: TrialPlan, folder: Path) -> TuneResult:
    """What the tuner answers."""
    job = TunedJob(config_file=plan.config_file, command=plan.command, world_size=_RANKS, where=_WHERE)
    answer, _ = tune_job(job, {"results_dir": str(folder / "tuned")})
    return answer


def _measured(every: Sequence[Candidate], plan: TrialPlan, folder: Path, end_s: float | None) -> list[TrialRecord]:
    """A round: each setting once, until the monotonic clock says `end_s`."""
    log = TrialLog(folder, json.dumps([plan.config_tree, plan.command]), overwrite=True)
    found = {record.candidate for record in log.records}
    for number, candidate in enumerate(every, 1):
        if candidate in found:
            continue
        if end_s is not None and monotonic() > end_s:
            print(f"{folder.name}: the time is over, {len(every) - number + 1} settings are left out", flush=True)
            break
        record, _ = run_trial(plan, candidate, folder / "trial")
        log.add(record)
        said = (
            f"{record.step_s:.3g} s, {(record.peak_nbytes or 0) / _MIB:.0f} MiB" if record.is_good else record.failure
        )
        print(f"{folder.name}, {number} of {len(every)}: {candidate}: {said}", flush=True)
    return list(log.records)


def _rows(answer: TuneResult, rounds: Sequence[Sequence[TrialRecord]]) -> list[Row]:
    """Each setting as it was foretold, and the shortest step of all rounds; without what failed in all."""
    rows = []
    for each in answer.foretold:
        good = [one for records in rounds for one in records if one.candidate == each.candidate and one.is_good]
        if good:
            step_s = min(one.step_s or 0.0 for one in good)
            rows.append(
                Row(each, replace(good[0], step_s=step_s, peak_nbytes=max(one.peak_nbytes or 0 for one in good)))
            )
    return rows


def _again(rows: Sequence[Row], answer: TuneResult) -> TrialRecord | None:
    """The tuner's choice as the rounds measured it."""
    best = None if answer.best is None else answer.best.candidate
    return next((row.measured for row in rows if row.measured.candidate == best), None)


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    columns = ("setting", "foretold s", "step s", "off by", "foretold MiB", "MiB", "off by")
    table = make_table(f"{args.size}, {args.batch} samples a step, {_RANKS} ranks", columns)
    for row in sorted(rows, key=lambda one: one.measured.step_s or 0.0):
        one = row.measured
        times = (f"{row.foretold.step_s:.3f}", f"{one.step_s:.3f}", f"{100 * row.time_error:+.0f} %")
        sizes = (f"{row.foretold.device_nbytes / _MIB:.0f}", f"{(one.peak_nbytes or 0) / _MIB:.0f}")
        table.add_row(str(one.candidate), *times, *sizes, f"{100 * row.memory_error:+.0f} %")
    return table


def _verdict(rows: Sequence[Row], answer: TuneResult, limit: int) -> str:
    """The figures that count, in words."""
    lines = []
    for what, bound, errors in (
        ("step times", _TIME_BOUND, [abs(row.time_error) for row in rows]),
        ("memory", _MEMORY_BOUND, [abs(row.memory_error) for row in rows]),
    ):
        within = sum(error <= bound for error in errors)
        middle, most = median(errors) if errors else 0.0, max(errors, default=0.0)
        off = f"the median off by {middle:.1%}, the worst by {most:.1%}"
        lines.append(f"Foretold {what}: {within} of {len(errors)} within {bound:.0%}, {off}.")
    best, ours = best_of([row.measured for row in rows], limit), _again(rows, answer)
    if best is not None and ours is not None:
        slower = (ours.step_s or 0.0) / (best.step_s or 1.0) - 1
        lines.append(
            f"The tuner's choice after {len(answer.records)} trials, {ours.candidate}, takes {ours.step_s:.3f} s a "
            f"step: {slower:.1%} more than the best of all below {limit / _MIB:.0f} MiB, {best.candidate}, with "
            f"{best.step_s:.3f} s."
        )
    return "\n".join(lines)
