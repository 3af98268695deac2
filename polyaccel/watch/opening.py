"""The beginning of a watched run: its folder, and its monitors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from polyaccel import plain
from polyaccel.comm.base import Communicator
from polyaccel.engine.metrics import Monitor
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.watch.stream import MonitorStream

RUN_FILE = "run.json"
"""In a run's folder: what `about_run` tells, the number of ranks, and when the run was last started."""


@dataclass(frozen=True, slots=True)
class ChosenMonitor:
    """The plugin `name` with its options, as the dotted `key` of the config asks for it."""

    name: str
    key: str
    options: Mapping[str, Any]


def open_stream(
    communicator: Communicator, folder: str | None, chosen: Sequence[ChosenMonitor], about: Mapping[str, Any]
) -> MonitorStream:
    """The stream of a run whose files are in `folder` (None: the working directory, where only monitors write): on rank
    0 to the `chosen` monitors, on the others to nobody.

    Collective where there is anything to open. Raises ConfigError on every rank when something cannot be.
    """
    if folder is None and not chosen:
        return MonitorStream()
    problems: list[Problem] = []
    opened: list[Monitor] = []
    if communicator.rank == 0:
        problems += [] if folder is None else _make_folder(Path(folder), communicator.world_size, about)
        for each in () if problems else chosen:
            try:
                opened.append(_opened(each, Path(folder or ".")))
            except ConfigError as error:
                problems += (_named(problem, each) for problem in error.problems)
            except PolyaccelError as error:
                problems.append(Problem(each.key, sorted(each.options), error.message, error.cure))
    problems = [Problem(*said) for said in communicator.broadcast_object([*map(_as_plain, problems)])]
    if problems:
        for monitor in opened:
            monitor.close()
        raise ConfigError(problems)
    return MonitorStream(opened)


def _opened(chosen: ChosenMonitor, folder: Path) -> Monitor:
    monitor: Monitor = load_plugin(PluginGroup.MONITORS, chosen.name, Monitor, Monitor.API_VERSION)()
    try:
        monitor.open(folder, chosen.options)
    except PolyaccelError:
        raise
    except Exception as error:  # a library's own: it cannot log in, say
        what = f"cannot be opened: {error or type(error).__name__}"
        problem = Problem(chosen.name, sorted(chosen.options), what, "leave it out, or cure that")
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
        return [Problem("run_folder", str(folder), f"cannot be written: {error}", "name another folder")]
    return []


def _as_plain(problem: Problem) -> tuple[str, object, str, str]:
    """The problem as rank 0 tells it to the others; the text of a value that is not plain."""
    value = problem.value
    try:
        plain.to_tree(value, problem.key)
    except plain.PlainError:
        value = repr(value)
    return problem.key, value, problem.expected, problem.cure
