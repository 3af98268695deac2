"""The beginning of a watched run: its folder, its monitors, and the files of each rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from logging import getLogger
from pathlib import Path
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.core import tagged_json
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.observability.dashboard.document import write_page
from polyaccel.observability.metrics import JsonlMonitor, Monitor
from polyaccel.observability.run_log import LOG_FILE, MOST_RANK_FILES, RANKS_FOLDER, REPORT_FILE, RUN_FILE, RunLog
from polyaccel.observability.stream import MonitorStream
from polyaccel.registry import PluginGroup, load_plugin

log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenMonitor:
    """The plugin `name` with its options, as the dotted `key` of the config asks for it."""

    name: str
    key: str
    options: Mapping[str, Any]


def start_monitoring(
    communicator: Communicator, folder: str | None, chosen: Sequence[ChosenMonitor], about: Mapping[str, Any]
) -> MonitorStream:
    """Start a run's stream: `chosen` monitors on rank 0, a file of steps elsewhere. Collective if any."""
    if folder is None and not chosen:
        return MonitorStream()
    # Files open late, and are read again at the end; the program may have another working directory by then.
    home = Path(folder or ".").absolute()
    problems: list[Problem] = []
    opened: list[Monitor] = []
    if communicator.rank == 0:
        problems += [] if folder is None else _make_folder(home, communicator.world_size, about)
        for each in () if problems else chosen:
            try:
                opened.append(_opened(each, home))
            except ConfigError as error:
                problems += (_named(problem, each) for problem in error.problems)
            except PolyaccelError as error:
                problems.append(Problem(each.key, sorted(each.options), error.message, error.hint))
    problems = [Problem(*said) for said in communicator.broadcast_object([*map(_as_plain, problems)])]
    if problems:
        for monitor in opened:
            monitor.close()
        raise ConfigError(problems)
    if folder is None:
        return MonitorStream(opened)
    own, at_close = _open_files_of_rank(home, communicator.rank)
    pictures = home if communicator.rank == 0 else None
    return MonitorStream(opened, own=own, pictures=pictures, at_close=at_close)


def _open_files_of_rank(folder: Path, rank: int) -> tuple[Monitor | None, list[Callable[[], object]]]:
    """Return a rank's step file (None on rank 0) and the closing action; unwritable files only warn."""
    if rank >= MOST_RANK_FILES or not (folder / RUN_FILE).is_file():
        return None, []
    own = None
    try:
        if rank != 0:
            own = JsonlMonitor(f"{RANKS_FOLDER}/{rank}.jsonl")
            own.open(folder, {})
        path = folder / LOG_FILE if rank == 0 else folder / RANKS_FOLDER / f"{rank}.{LOG_FILE}"
        ends: list[Callable[[], object]] = [RunLog(path, rank).finish]
        if rank == 0:
            ends.append(lambda: write_page(folder / REPORT_FILE, [folder]))
        return own, ends
    except (ConfigError, OSError) as error:
        log.warning("rank %d writes no files to the run's folder: %s", rank, error)
        return own, []


def _opened(chosen: ChosenMonitor, folder: Path) -> Monitor:
    monitor: Monitor = load_plugin(PluginGroup.MONITORS, chosen.name, Monitor, Monitor.API_VERSION)()
    try:
        monitor.open(folder, chosen.options)
    except PolyaccelError:
        raise
    except Exception as error:  # a library's own: for example it cannot log in
        what = f"cannot be opened: {error or type(error).__name__}"
        problem = Problem(chosen.name, sorted(chosen.options), what, "leave it out, or hint that")
        raise ConfigError([problem]) from error
    return monitor


def _named(problem: Problem, chosen: ChosenMonitor) -> Problem:
    """`problem` under the config's key: plugins call theirs by their own name."""
    rest = problem.key.removeprefix(chosen.name)
    return replace(problem, key=f"{chosen.key}{rest}" if rest[:1] in ("", ".") else f"{chosen.key}.{rest}")


def _make_folder(folder: Path, ranks: int, about: Mapping[str, Any]) -> list[Problem]:
    """Make a run's folder and write its `RUN_FILE`. Returns what went wrong."""
    said = {**about, "ranks": ranks, "started": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return [Problem("run_dir", str(folder), f"cannot be written: {error}", "name another folder")]
    return []


def _as_plain(problem: Problem) -> tuple[str, object, str, str]:
    """The problem as rank 0 sends it to the others; the text of a value that is not plain."""
    value = problem.value
    try:
        tagged_json.encode(value, problem.key)
    except tagged_json.SerializationError:
        value = repr(value)
    return problem.key, value, problem.expected, problem.hint
