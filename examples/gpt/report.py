"""What a run looked like, as one HTML page that needs no other file, and as loss.png where matplotlib is installed.

Made of the files in the run's folder alone, so it can be made again: `python examples/gpt/report.py runs/gpt`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from run_dir import RunFolder

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT, _MARGIN = 760, 320, 44
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.15rem 1rem .15rem 0;text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}
.bar{background:#3b73b9;height:.8rem}pre{background:#f4f5f7;padding:.8rem;overflow:auto;font-size:13px}
svg text{font-size:12px;fill:#57606a}
"""


@dataclass(frozen=True)
class History:
    """`metrics.jsonl`, in order of steps. Where a resumed run wrote a step again, the later one counts."""

    steps: Sequence[Mapping[str, Any]]
    validation: Points

    @classmethod
    def read(cls, file: Path) -> History:
        steps: dict[int, Mapping[str, Any]] = {}
        validation: dict[int, float] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("tag") == "validation_loss":
                validation[record["step"]] = record["value"]
            elif "tag" not in record:
                steps[record["step"]] = record
        return cls([steps[number] for number in sorted(steps)], sorted(validation.items()))

    @property
    def losses(self) -> Points:
        return [(record["step"], record["loss"]) for record in self.steps if record["loss"] is not None]


def write_report(folder: RunFolder) -> None:
    """Write report.html and, with matplotlib, loss.png."""
    history = History.read(folder.metrics)
    folder.report.write_text(page(folder, history), encoding="utf-8")
    if find_spec("matplotlib") is not None:
        draw_png(folder.loss_png, history)


def page(folder: RunFolder, history: History) -> str:
    """The whole page."""
    summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    title = f"{folder.path.name}: {summary['parameters'] / 1e6:.1f} M parameters, ZeRO-{summary['zero_stage']}"
    parts = {
        "Result": table(_results(history, summary)),
        "Loss": loss_svg(history.losses, history.validation),
        "Memory": table(
            [(f"rank {rank}, peak", _mib(nbytes)) for rank, nbytes in enumerate(summary["peak_memory_nbytes"])]
        ),
        "Traffic of a step": table(_traffic(summary)),
        "Where the time went": _phases(history),
        "Sample": f"<pre>{escape(folder.sample.read_text(encoding='utf-8'))}</pre>",
        "Config": f"<pre>{escape(folder.settings.read_text(encoding='utf-8'))}</pre>",
    }
    sections = "".join(f"<h2>{name}</h2>\n{body}\n" for name, body in parts.items())
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>\n{sections}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}</body></html>\n'


def loss_svg(losses: Points, validation: Points) -> str:
    """The curves as an inline picture: every step's training loss, and the validation losses joined by a line."""
    points = [*losses, *validation]
    if not points:
        return "<p>no step was taken</p>"
    last = max(step for step, _ in points) or 1
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    span = high - low or 1.0

    def place(step: float, loss: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * step / last
        y = _MARGIN / 2 + (_HEIGHT - 1.5 * _MARGIN) * (high - loss) / span
        return f"{x:.1f},{y:.1f}"

    lines = []
    for tick in range(5):
        loss = low + span * tick / 4
        left, right = place(0, loss), place(last, loss)
        lines.append(f'<polyline points="{left} {right}" stroke="#d0d7de" fill="none"/>')
        lines.append(f'<text x="4" y="{float(left.split(",")[1]) + 4:.1f}">{loss:.2f}</text>')
        x = float(place(last * tick / 4, low).split(",")[0])
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{last * tick // 4}</text>')
    for name, curve, colour, width in (("training", losses, "#9db7d8", 1), ("validation", validation, "#b5482a", 2)):
        path = " ".join(place(step, loss) for step, loss in curve)
        lines.append(
            f'<polyline points="{path}" stroke="{colour}" stroke-width="{width}" fill="none">'
            f"<title>{name}</title></polyline>"
        )
    lines.append(
        f'<text x="{_WIDTH - 4}" y="14" text-anchor="end">training (blue) and validation (red), nats a byte</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(lines)}</svg>'


def draw_png(file: Path, history: History) -> None:
    """The same curves as a picture file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in (("training", history.losses), ("validation", history.validation)):
        axes.plot(*zip(*curve, strict=True) if curve else ([], []), label=name)
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def _results(history: History, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("ranks", f"{summary['world_size']} ({summary['accelerator']}, {summary['comm']})"),
        ("precision", summary["precision"]),
        ("steps", str(len(history.steps))),
    ]
    if history.validation:
        (_, first), (_, last) = history.validation[0], history.validation[-1]
        rows.append(("validation loss", f"{first:.3f} at first, {last:.3f} at last"))
    if history.steps:
        total_s = sum(record["step_time_s"] for record in history.steps)
        rows.append(("time in steps", f"{total_s:.0f} s"))
        rows.append(("tokens a second, median", f"{median(record['tokens_per_s'] for record in history.steps):,.0f}"))
    return rows


def _traffic(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    ranks = summary["world_size"]
    rows = [
        (f"rank {rank}, sent", f"{numel / 1e6:.2f} M elements")
        for rank, numel in enumerate(summary["traffic_numel"])
        if numel is not None
    ]
    bound = 2 * summary["parameters"] * (ranks - 1) / ranks
    return [*rows, ("2 x parameters x (N-1)/N", f"{bound / 1e6:.2f} M elements")]


def _phases(history: History) -> str:
    """A bar a phase, of the time in steps."""
    total_s = sum(record["step_time_s"] for record in history.steps) or 1.0
    seconds: dict[str, float] = {}
    for record in history.steps:
        for phase, spent_s in record["phase_s"].items():
            seconds[phase] = seconds.get(phase, 0.0) + spent_s
    rows = [
        f'<tr><td>{escape(phase)}</td><td class="n">{spent_s:.1f} s</td><td class="n">{spent_s / total_s:.0%}</td>'
        f'<td style="width:20rem"><div class="bar" style="width:{100 * spent_s / total_s:.1f}%"></div></td></tr>'
        for phase, spent_s in seconds.items()
    ]
    return f"<table>{''.join(rows)}</table>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A row for each, a cell for each of its strings."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


if __name__ == "__main__":
    write_report(RunFolder(Path(sys.argv[1])))
