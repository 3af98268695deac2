"""The files of an answer: the best config, the table, the picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from polyaccel.job.trial_env import deep_merge
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.records import TrialRecord
from polyaccel.planner.autotune.tuner import TuneResult

BEST_FILE, TABLE_FILE, PICTURE_FILE = "best.json", "table.md", "front.svg"
_HEAD = ("setting", "step s", "estimated s", "MiB", "estimated MiB", "")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 460, 70, 20, 46, 56
_TICKS = 5
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2733 } .title { font-size: 15px; font-weight: 600 }
.grid { stroke: #8893a055 } .estimated { fill: #8893a0; fill-opacity: .35 } .tried { fill: #2463c9 }
.front { stroke: #2463c9; stroke-width: 2; fill: none } .best { fill: none; stroke: #d0342c; stroke-width: 2.5 }
.limit { stroke: #d0342c; stroke-dasharray: 6 4 } .page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
 text { fill: #e3e9f0 } .page { fill: #14181d } .tried { fill: #6ea8ff } .front { stroke: #6ea8ff }
 .best, .limit { stroke: #ff7b72 }
}
"""


def write_results(
    answer: TuneResult, own: Candidate, config_tree: Mapping[str, Any], train_batch_size: int, folder: Path
) -> None:
    """Write the result files into `folder`; without a best the old config goes. `own`: its own part."""
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


def pareto_front(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The good trials than which none is faster with no more memory, by memory."""
    front: list[TrialRecord] = []
    for record in sorted((one for one in records if one.is_good), key=lambda one: (one.peak_nbytes, one.step_s)):
        if not front or (record.step_s or 0.0) < (front[-1].step_s or 0.0):
            front.append(record)
    return front


def front_picture(answer: TuneResult) -> str:
    """Draw step seconds over MiB: measured blue, estimated grey, the front, the choice and the limit."""
    tried = [(one, one.peak_nbytes or 0, one.step_s or 0.0) for one in answer.records if one.is_good]
    known = {one.candidate for one, _, _ in tried}
    guessed = [
        (each, each.device_nbytes, each.step_s)
        for each in answer.estimates
        if each.candidate not in known and each.step_s is not None
    ]
    across = [nbytes / 2**20 for _, nbytes, _ in (*tried, *guessed)] + (
        [] if answer.limit_nbytes is None else [answer.limit_nbytes / 2**20]
    )
    up = [seconds for _, _, seconds in (*tried, *guessed)]
    x, y = _Axis(across, _LEFT, _WIDTH - _RIGHT), _Axis(up, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(x, y)]
    for each, nbytes, seconds in guessed:
        parts.append(_dot(x.at(nbytes / 2**20), y.at(seconds), 3, "estimated", f"{each.candidate}, estimated"))
    front = [(x.at((one.peak_nbytes or 0) / 2**20), y.at(one.step_s or 0.0)) for one in pareto_front(answer.records)]
    if front:
        parts.append(f'<path class="front" d="{_steps(front)}"/>')
    for record, nbytes, seconds in tried:
        said = f"{record.candidate}: {seconds:.3g} s, {nbytes / 2**20:.0f} MiB"
        parts.append(_dot(x.at(nbytes / 2**20), y.at(seconds), 5, "tried", said))
    if answer.best is not None:
        at = x.at((answer.best.peak_nbytes or 0) / 2**20), y.at(answer.best.step_s or 0.0)
        parts.append(_dot(*at, 9, "best", f"the best: {answer.best.candidate}"))
    if answer.limit_nbytes is not None:
        at_limit = x.at(answer.limit_nbytes / 2**20)
        parts.append(
            f'<line class="limit" x1="{at_limit:.1f}" x2="{at_limit:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        )
    title = "Nothing fits" if answer.best is None else f"Best: {answer.best.candidate}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
            f'<text class="title" x="{_LEFT}" y="26">{escape(title)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


class _Axis:
    """A scale from 0, or from a little below the least value where that is far from 0, to a little above the most."""

    def __init__(self, values: Iterable[float], begin: float, end: float) -> None:
        found = list(values) or [0.0, 1.0]
        least, most = min(found), max(found)
        room = 0.08 * (most - least) or 0.08 * most or 1.0
        self.least, self.most = max(0.0, least - room), most + room
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        return self._begin + (value - self.least) / (self.most - self.least) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        return [self.least + (self.most - self.least) * number / _TICKS for number in range(_TICKS + 1)]


def _axes(x: _Axis, y: _Axis) -> Iterable[str]:
    low = _HEIGHT - _BOTTOM
    for value in x.ticks():
        at = x.at(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{low}"/>'
        yield f'<text x="{at:.1f}" y="{low + 18}" text-anchor="middle">{value:.0f}</text>'
    for value in y.ticks():
        at = y.at(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle:.0f}" y="{_HEIGHT - 14}" text-anchor="middle">MiB of a rank</text>'
    yield f'<text x="{_LEFT - 8}" y="{_TOP - 6}" text-anchor="end">s a step</text>'


def _dot(x: float, y: float, radius: int, kind: str, said: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(said)}</title></circle>'


def _steps(points: list[tuple[float, float]]) -> str:
    """A path that stays at a point's height until the next one is reached."""
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}" + "".join(f" H{across:.1f} V{up:.1f}" for across, up in rest)
