"""A mixture of experts beside a dense model, as one HTML page: losses, sizes, and where the tokens went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median

from polyaccel.observability.metrics import StepMetrics

_WIDTH, _HEIGHT, _MARGIN = 760, 320, 44
_COLOURS = {"dense": "#57606a", "mixture": "#b5482a"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.15rem 1rem .15rem 0;text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}
.bar{background:#3b73b9;height:.8rem}pre{background:#f4f5f7;padding:.8rem;overflow:auto;font-size:13px}
svg text{font-size:12px;fill:#57606a}
"""


@dataclass
class Training:
    """What came of a model: its parameters, those that a token meets, validation losses by step, and every step."""

    name: str
    numel: int
    active: int
    validation: list[tuple[int, float]] = field(default_factory=list)
    steps: list[StepMetrics] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The median of a step."""
        return median(each.step_time_s or 0.0 for each in self.steps)


def write_report(file: Path, trainings: Sequence[Training], experts: int) -> None:
    """`trainings` took the same batches; the last is the mixture, whose layers have `experts` each."""
    title = f"{experts} experts, two of them for each token, beside a dense model"
    names = ("", *(training.name for training in trainings))
    figures = [
        names,
        ("parameters", *(f"{training.numel:,}" for training in trainings)),
        ("parameters that a token meets", *(f"{training.active:,}" for training in trainings)),
        ("validation loss at last", *(f"{training.validation[-1][1]:.4f}" for training in trainings)),
        ("ms a step, median", *(f"{1e3 * training.step_s:.0f}" for training in trainings)),
    ]
    rows = [names]
    rows += [
        (f"after {step} steps", *(f"{dict(training.validation)[step]:.4f}" for training in trainings))
        for step, _ in trainings[0].validation
    ]
    parts = {
        "Result": table(figures),
        "Validation loss, nats a byte": _curves(trainings) + table(rows),
        "Tokens an expert, in the last step": _loads(trainings[-1].steps[-1]),
        "Layers of experts": _layers(trainings[-1].steps),
    }
    sections = "".join(f"<h2>{escape(name)}</h2>\n{body}\n" for name, body in parts.items())
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n<h1>{escape(title)}</h1>\n{sections}'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{page}</body></html>\n", encoding="utf-8")


def _curves(trainings: Sequence[Training]) -> str:
    points = [point for training in trainings for point in training.validation]
    last, low, high = max(step for step, _ in points), min(loss for _, loss in points), max(loss for _, loss in points)
    span = high - low or 1.0
    lines = []
    for place, training in enumerate(trainings):
        path = " ".join(
            f"{_MARGIN + (_WIDTH - 2 * _MARGIN) * step / last:.1f},"
            f"{_MARGIN / 2 + (_HEIGHT - 1.5 * _MARGIN) * (high - loss) / span:.1f}"
            for step, loss in training.validation
        )
        colour = _COLOURS[training.name]
        lines.append(f'<polyline points="{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        lines.append(
            f'<text x="{_WIDTH - 4}" y="{14 + 16 * place}" text-anchor="end" style="fill:{colour}">'
            f"{training.name}, {training.validation[-1][1]:.4f} at last</text>"
        )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(lines)}</svg>'


def _loads(metrics: StepMetrics) -> str:
    """A row a layer, a bar an expert."""
    rows = []
    for name, layer in metrics.experts.items():
        most = max(layer.tokens) or 1
        bars = "".join(
            f'<td style="width:4rem"><div class="bar" style="width:{100 * count / most:.0f}%"></div>{count}</td>'
            for count in layer.tokens
        )
        rows.append(f"<tr><td>{escape(name)}</td>{bars}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _layers(steps: Sequence[StepMetrics]) -> str:
    """Medians over all steps."""
    rows = [("layer", "most tokens / mean", "dropped", "exchanged by rank 0, MB a step", "in ms a step")]
    for name in steps[-1].experts:
        found = [each.experts[name] for each in steps]
        rows.append(
            (
                name,
                f"{median(each.balance for each in found):.2f}",
                f"{median(each.dropped_share for each in found):.1%}",
                f"{median(each.exchanged_nbytes for each in found) / 1e6:.2f}",
                f"{1e3 * median(each.exchange_s for each in found):.1f}",
            )
        )
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A row for each, a cell for each of its strings."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
