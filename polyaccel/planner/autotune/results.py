"""The files of an answer: the best config, the table, the picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyaccel.job.trial_env import deep_merge
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.pictures import front_picture, pareto_front
from polyaccel.planner.autotune.records import TrialRecord
from polyaccel.planner.autotune.tuner import TuneResult

BEST_FILE, TABLE_FILE, PICTURE_FILE = "best.json", "table.md", "front.svg"
_HEAD = ("setting", "step s", "estimated s", "MiB", "estimated MiB", "")


def write_results(
    answer: TuneResult, own: Candidate, config_tree: Mapping[str, Any], train_batch_size: int, folder: Path
) -> None:
    """Write the files into `folder`. Without a best there is no config, and one of before is removed. `own` is the
    config's own part."""
    if answer.best is None:
        (folder / BEST_FILE).unlink(missing_ok=True)
    else:
        tree = best_config(answer.best, own, config_tree, train_batch_size)
        (folder / BEST_FILE).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    (folder / TABLE_FILE).write_text(table_of(answer) + "\n", encoding="utf-8")
    (folder / PICTURE_FILE).write_text(front_picture(answer), encoding="utf-8")


def best_config(
    best: TrialRecord, own: Candidate, config_tree: Mapping[str, Any], train_batch_size: int
) -> dict[str, Any]:
    """The config as it was written, with the settings in it in which the best differs from its `own`."""
    tree: dict[str, Any] = json.loads(json.dumps(config_tree))
    deep_merge(tree, _without(best.candidate.changes(train_batch_size), own.changes(train_batch_size)))
    return tree


def _without(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `tree` that `other` does not have, or has with another value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if below := _without(value, other.get(key, {})):
                found[key] = below
        elif other.get(key) != value:
            found[key] = value
    return found


def table_of(answer: TuneResult) -> str:
    """The trials as Markdown, the best first; with a mark on the front, and the reason of each failure."""
    front = pareto_front(answer.records)
    rows = [_HEAD]
    for record in sorted(answer.records, key=lambda one: (not one.is_good, one.step_s or 0.0)):
        notes = ["best"] if record is answer.best else []
        notes += ["front"] if record in front else []
        limit = answer.limit_nbytes
        notes += ["too large"] if record.is_good and limit is not None and (record.peak_nbytes or 0) > limit else []
        notes += [record.failure[:80].replace("|", "/")] if record.failure else []
        numbers = (_seconds(record.step_s), _seconds(record.foretold_s))
        sizes = (_mebibytes(record.peak_nbytes), _mebibytes(record.foretold_nbytes))
        rows.append((str(record.candidate), *numbers, *sizes, ", ".join(notes)))
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if at in (0, 5) else ":") for at, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"
