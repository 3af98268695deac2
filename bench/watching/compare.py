"""`python -m bench watching`: what monitors, times, traces, profiles and alarms cost, all together or each alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from bench.machine import describe_machine
from bench.steps.cases import SHAPES
from bench.steps.launch import figures_of
from bench.steps.sitting import listed, one_of, positive
from bench.table import make_console, make_table
from bench.watching.worker import VARIANTS

_STEP_LIMIT_S, _SETUP_LIMIT_S = 30.0, 300.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench watching", description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="29m", help="model (default: %(default)s)")
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="of ZeRO (default: %(default)s)")
    parser.add_argument("--ranks", type=positive, default=2, help="of one thread each (default: %(default)s)")
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--turns", type=positive, default=24, help="of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=4, help="of a turn (default: %(default)s)")
    parser.add_argument(
        "--impl",
        type=listed(one_of(VARIANTS)),
        default="nothing,everything",
        metavar="NAME,...",
        help=f"variants among {', '.join(VARIANTS)}; the first is what the others are held against "
        "(default: %(default)s)",
    )
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()), markup=False)
    variants = list(args.impl)
    given = {
        "variants": variants, "size": args.size, "stage": args.stage, "micro_batch": args.micro_batch,
        "turns": args.turns, "steps": args.steps,
    }  # fmt: skip
    limit_s = _SETUP_LIMIT_S + _STEP_LIMIT_S * len(variants) * (args.turns * args.steps + 10)
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "result.json")
        arguments = [json.dumps(given), str(result)]
        where = ["--nproc", str(args.ranks)]
        ranks = figures_of("bench.watching.worker", arguments, result, where, limit_s)
    title = f"{args.turns} turns of {args.steps} steps, {args.size}, stage {args.stage}, {args.ranks} ranks"
    columns = ("variant", "CPU ms a step", "quartiles", "more", "quartiles", "ms a step", "more", "quartiles")
    table = make_table(title, columns)
    base = variants[0]
    for name in variants:
        cpu, wall = _of(ranks, name, "cpu_s"), _of(ranks, name, "seconds")
        table.add_row(
            name,
            f"{1e3 * median(cpu):.1f}",
            _quartiles(cpu, 1e3),
            *_more(ranks, name, base, "cpu_s"),
            f"{1e3 * median(wall):.1f}",
            *_more(ranks, name, base, "seconds"),
        )
    console.print(table)
    console.print(
        '"more" is the median of a turn less the turn of the first variant in the same round, as a share of it'
    )
    return 0


def _of(ranks: list[Any], variant: str, figure: str) -> list[float]:
    """A figure of each turn, a mean over the ranks."""
    return [sum(turn) / len(turn) for turn in zip(*(rank[figure][variant] for rank in ranks), strict=True)]


def _more(ranks: list[Any], variant: str, base: str, figure: str) -> tuple[str, str]:
    if variant == base:
        return "-", "-"
    pairs = zip(_of(ranks, variant, figure), _of(ranks, base, figure), strict=True)
    shares = [own / other - 1 for own, other in pairs]
    return f"{100 * median(shares):+.2f} %", _quartiles(shares, 100)


def _quartiles(values: list[float], factor: float) -> str:
    if len(values) < 2:
        return "-"
    low, _, high = quantiles(values, n=4)
    return f"{factor * low:.1f} to {factor * high:.1f}"
