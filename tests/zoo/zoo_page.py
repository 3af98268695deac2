"""docs/zoo.md: the table of all rows, from the lines of JSON that a walk wrote."""

from __future__ import annotations

import re
from collections import Counter
from datetime import date
from typing import Any

from zoo_models import KINDS, entries
from zoo_rows import MESHES

_RESULTS = ("equal", "refused", "defect", "no loss")


def page(rows: list[dict[str, Any]], day: date) -> str:
    """Return the page."""
    built = [row for row in rows if row["mesh"] in MESHES]
    missing = [row for row in rows if row["mesh"] == "build"]
    models = sorted({row["model"] for row in built}, key=lambda key: (list(KINDS).index(key.split("/")[0]), key))
    counts = Counter(row["result"] for row in built)
    versions = sorted({f"torch {row['torch']}, transformers {row['transformers']}" for row in rows})
    reasons = {name: _numbered(built, name) for name in ("refused", "defect")}
    cells = {(row["model"], row["mesh"]): _cell(row, reasons) for row in built}
    return "\n".join(
        [
            "# The zoo",
            "",
            "`make test-zoo` walks the auto classes of transformers. It builds a tiny model of each class with random",
            "weights, and trains it for two steps under each mesh. A step has two micro-batches of unlike lengths.",
            "Loss, norm, every gradient, every update and every buffer are compared with plain torch in one process.",
            "",
            "The tolerance follows from plain runs whose weights are moved by one unit in the last place. The rewrites",
            "are the same in every precision, so the models train in float32.",
            "",
            "```text",
            'make test-zoo ARGS="--only causal/llama"',
            "```",
            "",
            f"This page is generated. Rows of {day.isoformat()}, with {' and '.join(versions)}:",
            f"{len(built)} rows of {len(models)} classes: {', '.join(f'{counts[one]} {one}' for one in _RESULTS)}.",
            f"Of all rows {100 * counts['refused'] / max(1, len(built)):.1f} % are refused.",
            f"{len(missing)} classes could not be built small enough or trained by plain torch, and have no row.",
            f"{max(0, len(entries()) - len(models) - len(missing))} classes of {len(entries())} were not walked yet.",
            "",
            "## By mesh",
            "",
            *_table(
                ["mesh", *_RESULTS, "equal by a hint", "equal, not acted"], [_counts(built, mesh) for mesh in MESHES]
            ),
            "",
            "## Rows",
            "",
            "An `=` is equal, and `(=)` equal while the rewrite found nothing to change. An `=h` was refused and is",
            "equal with what the refusal's hint says: `tiled_compute.mlp` or `loss` false, or the `sequence_parallel`",
            "method `tokenwise`. `R` is refused and `D` a defect, with the number of the reason below. A `-` stands",
            "where the mesh needs a loss, and the model has none.",
            "Blank cells do not apply: only text models are cut along the sequence, and only mixtures have experts.",
            "",
            *_table(
                ["class", *MESHES],
                [[_class(built, model), *(cells.get((model, mesh), "") for mesh in MESHES)] for model in models],
            ),
            *_reasons("Refusals", "R", reasons["refused"]),
            *_reasons("Defects", "D", reasons["defect"]),
            "",
        ]
    )


def _counts(rows: list[dict[str, Any]], mesh: str) -> list[str]:
    counts = Counter(row["result"] for row in rows if row["mesh"] == mesh)
    idle = sum(row["mesh"] == mesh and row["result"] == "equal" and not row["acted"] for row in rows)
    hinted = sum(row["mesh"] == mesh and bool(row.get("hint")) for row in rows)
    return [mesh, *(str(counts[one]) for one in _RESULTS), str(hinted), str(idle)]


def _class(rows: list[dict[str, Any]], model: str) -> str:
    return next(f"{row['class']} ({model.split('/')[0]})" for row in rows if row["model"] == model)


def _cell(row: dict[str, Any], reasons: dict[str, dict[str, tuple[int, int]]]) -> str:
    if row["result"] in reasons:
        return f"{row['result'][0].upper()}{reasons[row['result']][_reason(row)][0]}"
    if row["result"] == "no loss":
        return "-"
    return ("=h" if row.get("hint") else "=") if row["acted"] else "(=)"


def _reason(row: dict[str, Any]) -> str:
    """The reason of a row without the names of its class and layers."""
    first = " ".join(row["detail"].split("\n  hint:")[0].replace("config: 1 problem", "").split())
    if row["result"] == "defect":
        return first.partition("; they stand")[0][:240].replace("|", "at")
    text = re.sub(r" hint: .*", "", first.replace(row["class"], "model").replace("|", "at"))
    text = re.sub(r"(?<![\w.])\w+(\.\w+)+(?![\w(])", lambda one: one[0] if "tiled" in one[0] else "*", text)
    text = re.sub(r" \([^()]*\)", "", text)
    return re.sub(r"-?\b\d+(\.\d+)?(e-?\d+)?\b", "N", text)[:240]


def _numbered(rows: list[dict[str, Any]], result: str) -> dict[str, tuple[int, int]]:
    counts = Counter(_reason(row) for row in rows if row["result"] == result)
    return {reason: (at, count) for at, (reason, count) in enumerate(counts.most_common(), 1)}


def _reasons(title: str, letter: str, reasons: dict[str, tuple[int, int]]) -> list[str]:
    if not reasons:
        return []
    lines = [[f"{letter}{at}", str(count), f"`{reason.replace('`', '')}`"] for reason, (at, count) in reasons.items()]
    return ["", f"## {title}", "", *_table(["", "rows", "reason"], lines)]


def _table(head: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]
