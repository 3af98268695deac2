"""What the tuner chooses beside an exhaustive search, and what it foretells beside what is measured.

First the tuner runs, as `polyaccel tune` does, with a limit of memory and of trials. Then every setting of the search
is measured, and compared with what was foretold of it when the tuner had ended. Memory is the most that any rank's
process had resident. A setting that the tuner tried is measured again, so that its choice is not judged by its own
figures. The figures of a search that was stopped stay in --folder, and the next one goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from rich.table import Table

from bench.machine import describe_machine
from bench.steps.cases import SHAPES
from bench.steps.launch import rank_environment
from bench.table import make_console, make_table
from polyaccel.cli.plan.verb import parse_size
from polyaccel.cli.tune import TunedJob, tune_job
from polyaccel.tuning.foretelling import Foretold
from polyaccel.tuning.records import TrialLog, TrialRecord
from polyaccel.tuning.trials import TrialPlan, run_trial
from polyaccel.tuning.tuner import TuningAnswer, best_of, in_order

_RANKS = 2
_TRIALS, _MARGIN = 8, 0.5
_SMALL_BUCKET_NUMEL = 1_000_000
_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """A setting as it was foretold and measured."""

    foretold: Foretold
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
    parser.add_argument("--batch", type=int, default=8, help="samples of a step (default: %(default)s)")
    parser.add_argument("--settings", type=int, default=30, help="that are measured (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="measured of each (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/bench-tuning"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    os.environ.update(rank_environment())
    console = make_console()
    console.print(str(describe_machine()))
    began = monotonic()
    answer, plan = _tuned(args)
    tuned_s = monotonic() - began
    chosen = _chosen(answer, args.settings)
    rows = _measured(chosen, plan, args.folder)
    console.print(_table(rows, args))
    console.print(_verdict(rows, answer, args.limit, tuned_s, monotonic() - began))
    best = best_of([row.measured for row in rows], args.limit)
    ours = _again(rows, answer)
    return 0 if best is not None and ours is not None and (ours.step_s or 0) < 1.05 * (best.step_s or 0) else 1


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """What is tuned: stages, micro-batches, recomputation and bucket sizes, 48 settings of 8 samples."""
    return {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "autotuning": {
            "memory_limit": args.limit,
            "bucket_sizes": [_SMALL_BUCKET_NUMEL],
            "tuner_num_trials": _TRIALS,
            "tuner_early_stopping": 0,
            "margin": _MARGIN,
            "start_profile_step": 2,
            "end_profile_step": 1 + args.steps,
            "trial_timeout": 300.0,
        },
    }


def _tuned(args: argparse.Namespace) -> tuple[TuningAnswer, TrialPlan]:
    """Run the tuner; its answer, and how its trials ran."""
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config, tree = folder / "config.json", _config(args)
    config.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    script = str(_ROOT / "bench" / "tuning" / "train.py")
    where = ("--nproc", str(_RANKS), "--grace", "1")
    command = (sys.executable, "-m", "polyaccel", "run", *where, script, str(config), args.size)
    job = TunedJob(config_file=str(config), command=command, world_size=_RANKS, where=where)
    answer, _ = tune_job(job, {"results_dir": str(folder / "tuned")})
    plan = TrialPlan(
        command=command,
        config_file=str(config),
        config_tree=tree,
        train_batch_size=args.batch,
        first_step=2,
        last_step=1 + args.steps,
        limit_s=300.0,
        mapped={},
    )
    return answer, plan


def _chosen(answer: TuningAnswer, count: int) -> list[Foretold]:
    """So many settings, spread evenly over all from the fastest foretold to the slowest, the tuner's choice among
    them."""
    every = in_order(answer.foretold, None)
    last = max(1, min(count, len(every)) - 1)
    found = {at * (len(every) - 1) // last: None for at in range(min(count, len(every)))}
    best = None if answer.best is None else answer.best.candidate
    ours = next((at for at, each in enumerate(every) if each.candidate == best), None)
    if ours is not None and ours not in found:
        found.pop(min(found, key=lambda at: (abs(at - ours), at)))
        found[ours] = None
    return [every[at] for at in sorted(found)]


def _measured(chosen: Sequence[Foretold], plan: TrialPlan, folder: Path) -> list[Row]:
    """Measure each; what fails is left out and told."""
    key = json.dumps([plan.config_tree, plan.command])
    log = TrialLog(folder / "search", key, overwrite=True)
    found = {record.candidate: record for record in log.records}
    for number, each in enumerate(chosen, 1):
        if each.candidate not in found:
            record, _ = run_trial(plan, each.candidate, folder / "search" / "trial")
            log.add(record)
            found[each.candidate] = record
        record = found[each.candidate]
        said = f"{record.step_s:.3g} s" if record.is_good else record.failure
        print(f"{number} of {len(chosen)}: {each.candidate}: {said}", flush=True)
    return [Row(each, found[each.candidate]) for each in chosen if found[each.candidate].is_good]


def _again(rows: Sequence[Row], answer: TuningAnswer) -> TrialRecord | None:
    """The tuner's choice as it was measured in the search."""
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


def _verdict(rows: Sequence[Row], answer: TuningAnswer, limit: int, tuned_s: float, all_s: float) -> str:
    """The figures that count, in words."""
    lines = []
    for what, errors in (
        ("step times", [abs(row.time_error) for row in rows]),
        ("memory", [abs(row.memory_error) for row in rows]),
    ):
        within = sum(error <= (0.15 if what == "step times" else 0.10) for error in errors)
        bound = "15" if what == "step times" else "10"
        middle, most = median(errors) if errors else 0.0, max(errors, default=0.0)
        off = f"the median off by {middle:.1%}, the worst by {most:.1%}"
        lines.append(f"Foretold {what}: {within} of {len(errors)} within {bound} %, {off}.")
    best, ours = best_of([row.measured for row in rows], limit), _again(rows, answer)
    if best is not None and ours is not None:
        slower = (ours.step_s or 0.0) / (best.step_s or 1.0) - 1
        lines.append(
            f"The tuner's choice after {len(answer.records)} trials and {tuned_s:.0f} s, {ours.candidate}, takes "
            f"{ours.step_s:.3f} s a step: {slower:.1%} more than the best of all below {limit / _MIB:.0f} MiB, "
            f"{best.candidate}, with {best.step_s:.3f} s. All of it took {all_s:.0f} s."
        )
    return "\n".join(lines)
