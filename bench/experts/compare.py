"""`python -m bench experts`: a step of a mixture of experts on two ranks, by ours with experts spread over both ranks
and on each, by plain torch, and by DeepSpeed's layers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from bench.machine import describe_machine
from bench.steps.sitting import positive
from bench.table import make_console, make_table

_ROOT = Path(__file__).resolve().parents[2]
_WORKER = str(Path(__file__).with_name("worker.py"))
_LIMIT_S = 600.0
_NEAR = 1e-3
_OURS = ("polyaccel, ep 2", "polyaccel, ep 1")
_DEEPSPEED = ("DeepSpeed, ep 2",)


def main(argv: Sequence[str]) -> int:
    """Every variant in each round, one after another, and the medians over all steps. 1 if some variant computed other
    losses."""
    parser = argparse.ArgumentParser(prog="python -m bench experts", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="launches of each (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="measured in each launch (default: %(default)s)")
    parser.add_argument("--deepspeed", type=Path, metavar="PYTHON", help="an environment with it and transformers")
    for name, default, said in (
        ("hidden", 256, "features of a token"),
        ("inner", 512, "of an expert"),
        ("layers", 4, "blocks"),
        ("experts", 16, "of a layer, two a token"),
        ("length", 512, "tokens of a sequence"),
        ("batch", 1, "sequences a rank"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{said} (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO, but for DDP (default: %(default)s)")
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()))
    names = ("hidden", "inner", "layers", "experts", "length", "batch", "stage")
    sizes = {name: getattr(args, name) for name in names}
    variants = [*_OURS, "DDP", *(_DEEPSPEED if args.deepspeed else ())]
    taken: dict[str, list[list[Any]]] = {variant: [] for variant in variants}
    for turn in range(args.rounds):
        first = turn % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            taken[variant].append(measured(variant, args.steps, sizes, args.deepspeed))
            seconds = median(taken[variant][-1][0]["seconds"])
            console.print(f"round {turn + 1}, {variant}: {1e3 * seconds:.0f} ms a step")
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items())
    table = make_table(
        f"a mixture on two ranks of a thread each, fp32: {shown}",
        (
            *("variant", "median ms", "least ms", "CPU ms", "times ours", "in CPU"),
            *("forward", "backward", "update", "loss off by"),
        ),
    )
    wanted = taken["DDP"][0]
    base = _medians(taken[_OURS[0]])
    is_wrong = False
    for variant, runs in taken.items():
        found = _medians(runs)
        off = max(
            abs(a - b)
            for rank, other in zip(runs[0], wanted, strict=True)
            for a, b in zip(rank["losses"], other["losses"], strict=True)
        )
        is_wrong |= off > _NEAR
        least = min(one for run in runs for one in run[0]["seconds"])
        table.add_row(
            variant,
            *(f"{1e3 * each:.0f}" for each in (found["seconds"], least, found["cpu"])),
            *(f"{found[each] / base[each]:.2f}" for each in ("seconds", "cpu")),
            *(f"{1e3 * found[each]:.0f}" for each in ("forward", "backward", "update")),
            f"{off:.0e}" + (" WRONG" if off > _NEAR else ""),
        )
    console.print(table)
    console.print(_of_dispatches([run[0]["dispatches"] for run in taken[_OURS[0]]]))
    return int(is_wrong)


def _of_dispatches(runs: Sequence[Sequence[Any]]) -> Table:
    """Of each size of rows the medians over all launches of rank 0. Both ranks run at once, so seconds have the wait
    for the other rank in them, CPU seconds have not."""
    table = make_table(
        "rows to their experts and back, but for gathering them by expert, which one rank does too; us (CPU us)",
        ("rows of", "there and back", "gathered", "two copies", "times copies", "in CPU", "told how many come"),
    )
    for of_size in zip(*runs, strict=True):
        ways, gathered, copied, told = (
            [1e6 * median(one[clock] for run in of_size for one in run[name]) for clock in (0, 1)]
            for name in ("travelled", "gathered", "copied", "told")
        )
        way = [each - other for each, other in zip(ways, gathered, strict=True)]
        table.add_row(
            f"{of_size[0]['nbytes'] / (1 << 20):.3g} MiB",
            *(f"{seconds:.0f} ({cpu:.0f})" for seconds, cpu in (way, gathered, copied)),
            *(f"{each / other:.1f}" for each, other in zip(way, copied, strict=True)),
            f"{told[0]:.0f} ({told[1]:.0f})",
        )
    return table


def _medians(runs: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Over all steps of all runs; CPU time is the mean of the ranks', all else is rank 0's."""
    names = ("seconds", "forward", "backward", "update")
    found = {name: median(one for run in runs for one in run[0][name]) for name in names}
    cpu = [sum(of_step) / 2 for run in runs for of_step in zip(*(rank["cpu"] for rank in run), strict=True)]
    return found | {"cpu": median(cpu)}


def measured(variant: str, steps: int, sizes: dict[str, int], deepspeed: Path | None) -> list[Any]:
    """What each rank measured of one launch of a variant."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "result")
        arguments = [_WORKER, variant, str(steps), str(result), json.dumps(sizes)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(_ROOT)}
        if variant in _OURS:
            start = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2"]
        else:
            python = Path(sys.executable)
            if variant in _DEEPSPEED and deepspeed is not None:
                python = deepspeed
                environ |= {"PYTHONPATH": "", "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
            start = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        start += arguments
        job = subprocess.run(start, cwd=folder, env=environ, capture_output=True, text=True, timeout=_LIMIT_S)
        files = [result.with_name(f"result.{rank}") for rank in range(2)]
        if not all(file.exists() for file in files):
            raise SystemExit(f"{variant} gave no figures:\n{job.stdout}{job.stderr}")
        return [json.loads(file.read_text()) for file in files]
