"""A tuner's job from its config to its results: what the tuner asks for is read, measured and written here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polyaccel.comm.benchmark import CollectiveTimings
from polyaccel.config.load import read_tree
from polyaccel.errors import PolyaccelError
from polyaccel.job.trial_env import TRIAL_VARIABLE
from polyaccel.planner.assumptions import planned_config
from polyaccel.planner.autotune.candidates import own_candidate
from polyaccel.planner.autotune.hardware_probe import HardwareRates, rates_here
from polyaccel.planner.autotune.records import TrialLog
from polyaccel.planner.autotune.results import BEST_FILE, table_of, write_results
from polyaccel.planner.autotune.trials import TrialPlan
from polyaccel.planner.autotune.tuner import TuneRequest, TuneResult, tune

_COMM_OPERATIONS = "all_reduce,all_gather,reduce_scatter"
_COMM_LIMIT_S = 120.0
_PRINT = partial(print, flush=True)
COMM_FILE, RATES_FILE = "comm.json", "rates.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedJob:
    """A training that is tuned: the file of its config, and what is in it where that is not read as it is (`tree`), the
    command that starts its ranks, how many these are, and the options of `polyaccel run` that say where they are, for
    measuring collectives there (None: that is not done)."""

    config_file: str
    tree: Mapping[str, Any] | None = None
    command: tuple[str, ...]
    world_size: int
    where: tuple[str, ...] | None


def tune_job(
    job: TunedJob,
    section: Mapping[str, Any],
    speeds_file: Path | None = None,
    report: Callable[[str], object] = _PRINT,
) -> tuple[TuneResult, Path]:
    """Tune a job by `section`, write and `report` results; return them and their folder."""
    if TRIAL_VARIABLE in os.environ:
        raise PolyaccelError(
            f"{TRIAL_VARIABLE} is set: this is a trial of a tuner already", hint=f"unset {TRIAL_VARIABLE}"
        )
    planned = planned_config(job.config_file if job.tree is None else job.tree, job.world_size)
    tree = read_tree(job.config_file)[0] if job.tree is None else job.tree
    config = planned.config
    tuning = config.autotuning.model_copy(update=dict(section))
    config = config.model_copy(update={"autotuning": tuning})
    results = Path(tuning.results_dir)
    plan = TrialPlan(
        command=job.command,
        config_file=job.config_file,
        config_tree=tree,
        train_batch_size=config.train_batch_size,
        first_step=tuning.start_profile_step,
        last_step=tuning.end_profile_step,
        limit_s=tuning.trial_timeout,
        mapped={key: str(option) for key, option in tuning.arg_mappings.items()},
    )
    question = TuneRequest(
        config=config,
        world_size=job.world_size,
        plan=plan,
        trials_folder=Path(tuning.exps_dir) if "results_dir" not in section else results / "trials",
        limit_nbytes=tuning.memory_limit,
    )
    log = TrialLog(results, question.key, overwrite=tuning.overwrite)
    for sentence in planned.assumptions:
        report(f"Assumed: {sentence}.")
    if log.records:
        report(f"{len(log.records)} trials of before count: {results}")
    question = replace(question, speeds=_speeds(job, speeds_file, results, report), rates=_rates(results))
    answer = tune(question, log, report)
    write_results(answer, own_candidate(config), tree, config.train_batch_size, results)
    report(f"\n{table_of(answer)}\n\nStopped: {answer.why}.")
    if answer.best is None:
        report("Nothing that was tried fits.")
    else:
        report(f"Best: {answer.best.candidate}. Its config: {results / BEST_FILE}")
    return answer, results


def _rates(results: Path) -> HardwareRates:
    file = results / RATES_FILE
    with suppress(OSError, ValueError, TypeError):
        return HardwareRates(**json.loads(file.read_text(encoding="utf-8")))
    found = rates_here(results)
    file.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
    return found


def _speeds(
    job: TunedJob, given: Path | None, results: Path, report: Callable[[str], object]
) -> CollectiveTimings | None:
    """Return the collectives' speeds: from a file, earlier, or measured; None if impossible."""
    if given is not None:
        return CollectiveTimings.read(given)
    if job.world_size < 2 or job.where is None:
        return None
    file = results / COMM_FILE
    if not file.exists() and (said := _measure_speeds(job.where, job.config_file, file)):
        report(f"Collectives could not be measured, 1 GB/s is assumed: {said}")
        return None
    return CollectiveTimings.read(file)


def _measure_speeds(where: Sequence[str], config_file: str, file: Path) -> str:
    """Measure collectives into a file. What went wrong, or ""."""
    sizes = ("--smallest", "64K", "--largest", "16M", "--rounds", "5", "--budget", "0.1")
    own = ("--operations", _COMM_OPERATIONS, *sizes, "--config", config_file, "--json", str(file))
    command = [sys.executable, "-m", "polyaccel", "comm", "bench", *own, *where]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMM_LIMIT_S, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 and file.exists() else " | ".join(done.stderr.splitlines()[-3:])
