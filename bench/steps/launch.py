"""Starting a job's ranks with `polyaccel run`, each on one thread, and reading what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter

from bench.steps.cases import Job, Run, Variant

_ROOT = Path(__file__).resolve().parents[2]
_SETUP_LIMIT_S = 120.0
_STEP_LIMIT_S = 60.0
_GRACE_S = 20.0
_LAST_LINES = 12
_RUN = TypeAdapter(Run)


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that ended badly, and the last lines that its ranks wrote.

    `run` is what it measured, if it came that far: FSDP2 over gloo now and then aborts while the process ends.
    """

    job: Job
    reason: str
    output: str
    run: Run | None = None


def why_absent(variant: Variant) -> str | None:
    """Why this machine cannot run `variant`; None if it can."""
    if variant.family == "deepspeed" and find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return None


def run_job(job: Job, options: Sequence[str] = ()) -> Run | Failure:
    """Launch the ranks, by other `options` than so many on this machine, and wait for them. Only one job runs at a
    time, or both would measure each other."""
    limit_s = _SETUP_LIMIT_S + _STEP_LIMIT_S * (job.warmup + job.steps)
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result, log = Path(folder, "run.json"), Path(folder, "log")
        where = options or ("--nproc", str(job.case.world_size))
        command = [sys.executable, "-m", "polyaccel", "run", *where, "--module", "bench.steps.worker"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, job.to_json(), str(result)],
                cwd=_ROOT,
                env=rank_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            reason = _await(process, limit_s)
        run = _RUN.validate_json(result.read_bytes()) if result.exists() else None
        if reason is None and run is not None:
            return run
        last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return Failure(job, reason or "its ranks wrote no figures", "\n".join(last), run)


def figures_of(module: str, arguments: Sequence[str], result: Path, options: Sequence[str], limit_s: float) -> Any:
    """What the ranks of `polyaccel run options --module module arguments` have written to `result`, as JSON. Exits with
    their last lines if they failed."""
    command = [sys.executable, "-m", "polyaccel", "run", *options, "--module", module, *arguments]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env=rank_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
    )
    if done.returncode:
        raise SystemExit("\n".join(done.stdout.splitlines()[-_LAST_LINES:]))
    return json.loads(result.read_text())


def rank_environment() -> dict[str, str]:
    """One thread a rank, on the CPU, for every library alike."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def _await(process: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """Wait for the launcher; returns what went wrong, None for nothing. Ends it, and thereby its ranks, if we end."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"it took more than {limit_s:.0f} s"
    except BaseException:
        _end(process)
        raise
    return None if code == 0 else f"its exit code was {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # the launcher passes it on
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
