"""A trial: the first steps of a training with other settings, in separate processes that end with it.

[Note: Trial termination]
The command is a separate job: it leads a session, so no signal for us reaches it, and on Linux the kernel ends it
with us. It is ended when its figures are there, when it ends itself, or when its time is over: first by SIGTERM, which
a launcher passes on, then by SIGKILL; what is left then is found by the variable that names the trial's folder, which
every process of it has inherited, however often it forked. Nothing of it is in our memory, and its files are in its
folder, so it cannot harm the next one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from polyaccel.job.trial_env import CHANGES_FILE, MODEL_FILE, TRIAL_VARIABLE, TrialModel, deep_merge
from polyaccel.launch.process import end_with_parent
from polyaccel.launch.tree import ProcessTracker
from polyaccel.observability.metrics import JsonlMonitor
from polyaccel.planner.autotune.candidates import Candidate, quiet_changes
from polyaccel.planner.autotune.records import TrialRecord

OUTPUT_FILE = "output.txt"
_POLL_S = 0.02
_GRACE_S = 10.0
_KILL_ROUNDS = 100
_LAST_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """How every trial runs. `command` starts the training; words of it that name `config_file` name the trial's own
    config instead. `mapped` are options of the script by the dotted keys of the config that they repeat. Steps from
    `first_step` to `last_step` are measured, and the trial has ended after `limit_s` seconds."""

    command: tuple[str, ...]
    config_file: str
    config_tree: Mapping[str, Any]
    train_batch_size: int
    first_step: int = 3
    last_step: int = 5
    limit_s: float = 600.0
    mapped: Mapping[str, str]


def run_trial(plan: TrialPlan, candidate: Candidate, folder: Path) -> tuple[TrialRecord, TrialModel | None]:
    """Try `candidate` in `folder`, which is emptied first; what the trial found, and what its model is made of."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder = folder.resolve()
    changes = {**candidate.changes(plan.train_batch_size), **quiet_changes(folder)}
    _keep_files_inside(changes, candidate, folder)
    (folder / CHANGES_FILE).write_text(json.dumps(changes, indent=1) + "\n", encoding="utf-8")
    config = folder / "config.json"
    config.write_text(json.dumps(_changed(plan.config_tree, changes), indent=1) + "\n", encoding="utf-8")
    command = _with_arguments(plan, candidate, config)
    began = monotonic()
    failure = _supervise(plan, command, folder)
    steps = _steps(_figures(folder)[0])
    measured = [step for step in steps if step["step"] >= plan.first_step]
    if failure or not measured:
        why = failure or f"it ended after {len(steps)} steps, and step {plan.first_step} is the first that counts"
        record = TrialRecord(candidate=candidate, failure=why, wall_s=monotonic() - began)
    else:
        by_time = sorted(measured, key=lambda step: float(step["step_time_s"]))
        shortest_s, longest_s = by_time[0]["step_time_s"], by_time[-1]["step_time_s"]
        record = TrialRecord(
            candidate=candidate,
            step_s=shortest_s,
            spread=(longest_s - shortest_s) / (2 * shortest_s),
            phase_s=by_time[0]["phase_s"],
            peak_nbytes=max(step["peak_memory_nbytes"] for figure in _figures(folder) for step in _steps(figure)),
            wall_s=monotonic() - began,
        )
    return record, _trial_model(folder)


def _keep_files_inside(changes: dict[str, Any], candidate: Candidate, folder: Path) -> None:
    """Put state files into the trial's folder, which outlives a killed trial."""
    zero = changes["zero_optimization"]
    for key, device in (("offload_optimizer", candidate.offload), ("offload_param", candidate.offload_param)):
        if device == "nvme":
            zero[key]["nvme_path"] = str(folder)


def _changed(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    deep_merge(copy, changes)
    return copy


def _with_arguments(plan: TrialPlan, candidate: Candidate, config: Path) -> list[str]:
    """The command with the trial's own config, and with its values for arguments that repeat the config's."""
    words = []
    for word in plan.command:
        name, mark, value = word.partition("=")
        is_named = mark and name.startswith("-") and value == plan.config_file
        words.append(str(config) if word == plan.config_file else f"{name}={config}" if is_named else word)
    values = candidate.changes(plan.train_batch_size)
    for key, option in plan.mapped.items():
        value = _value_of(values, key)
        if value is not None:
            words = _replaced(words, option, str(value))
    return words


def _value_of(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _replaced(words: Sequence[str], option: str, value: str) -> list[str]:
    """`words` with `option` given as `value`, which is added where it was not given."""
    found, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        if word == option and left:
            left.pop(0)
        elif not word.startswith(f"{option}="):
            found.append(word)
    return [*found, option, value]


def _supervise(plan: TrialPlan, command: Sequence[str], folder: Path) -> str:
    """Run `command` until the last step is there; why it came to nothing, or ""."""
    environment = {**os.environ, TRIAL_VARIABLE: str(folder)}
    with (folder / OUTPUT_FILE).open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid(), signal.SIGTERM),
            )
        except OSError as error:
            return f"it could not be started: {error}"
    try:
        ended = _await(process, plan, folder)
    finally:
        _end(process, folder)
    if ended:
        return ended
    if (last := _last_step(folder)) >= plan.first_step:
        return ""
    said = _last_words(folder)
    return f"it ended with code {process.returncode} after {last} steps{f': {said}' if said else ''}"


def _await(process: subprocess.Popen[bytes], plan: TrialPlan, folder: Path) -> str:
    """Wait until the trial has made its steps or has ended; what is wrong where its time is over."""
    deadline = monotonic() + plan.limit_s
    while process.poll() is None and _last_step(folder) < plan.last_step:
        if monotonic() > deadline:
            return f"it had made {_last_step(folder)} steps when its {plan.limit_s:.0f} s were over"
        sleep(_POLL_S)
    return ""


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Leave no process of the trial. See [Note: Trial termination]."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    tree = ProcessTracker(str(folder), TRIAL_VARIABLE)
    tree.add(process.pid)
    for _ in range(_KILL_ROUNDS):
        if not tree.signal(signal.SIGKILL):
            return
        sleep(_POLL_S)


def _figures(folder: Path) -> list[Path]:
    """The files with the steps of each rank, rank 0 first."""
    return [folder / JsonlMonitor.FILE_NAME, *folder.glob("ranks/[0-9]*.jsonl")]


def _steps(file: Path) -> list[dict[str, Any]]:
    """The steps that a file has so far; lines that are not whole yet are left for later."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            tree = json.loads(line)
            if "peak_memory_nbytes" in tree:
                found.append(tree)
    return found


def _last_step(folder: Path) -> int:
    return max((step["step"] for step in _steps(_figures(folder)[0])), default=0)


def _trial_model(folder: Path) -> TrialModel | None:
    with suppress(OSError, ValueError, LookupError):
        return TrialModel.from_json((folder / MODEL_FILE).read_text(encoding="utf-8"))
    return None


def _last_words(folder: Path) -> str:
    """The last lines of the trial's output, as one sentence."""
    with suppress(OSError):
        lines = (folder / OUTPUT_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
    return ""
