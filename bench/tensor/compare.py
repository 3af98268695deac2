"""`python -m bench tensor`: the passes of two tensor ranks, of two that share tokens too, of torch's DTensor, and of
one rank with two threads; and what autograd keeps of a forward pass."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.steps.launch import figures_of
from bench.table import make_console, make_table

VARIANTS = ("polyaccel", "tokens shared", "DTensor", "one rank")
_LIMIT_S = 600.0


def main(argv: list[str]) -> int:
    """Run every variant in each round, one after another, and print the medians over all steps."""
    parser = argparse.ArgumentParser(prog="bench tensor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of all variants (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="of each variant in a round (default 10)")
    options = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    losses: dict[str, list[float]] = {}
    kept: dict[str, int] = {}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            found = measured(variant, options.steps)
            seconds[variant] += found["seconds"]
            losses[variant] = found["losses"]
            kept[variant] = found["kept_nbytes"]
    base = median(seconds["DTensor"])
    shown = make_table(
        "two tensor ranks", ("variant", "median ms", "min ms", "times DTensor", "loss off by", "kept MB")
    )
    for variant, each in seconds.items():
        off = max(abs(a - b) for a, b in zip(losses[variant], losses["one rank"], strict=True))
        times = [f"{median(each) * 1e3:.1f}", f"{min(each) * 1e3:.1f}", f"{base / median(each):.2f}"]
        shown.add_row(variant, *times, f"{off:.1e}", f"{kept[variant] / 2**20:.1f}")
    make_console().print(shown)
    return 0


def measured(variant: str, steps: int) -> Any:
    """What rank 0 of a variant's job has measured."""
    ranks = 1 if variant == "one rank" else 2
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "figures.json")
        arguments = [variant, str(steps), str(result)]
        return figures_of("bench.tensor.worker", arguments, result, ["--nproc", str(ranks)], _LIMIT_S)
