"""`python -m bench pipeline`: steps of two stages, beside their table's makespan, torch's pipelines and data ranks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.steps.launch import figures_of, rank_environment
from bench.table import make_console, make_table
from polyaccel.pipeline.schedules import make_table as make_pipeline
from polyaccel.pipeline.table import PipelineOp
from polyaccel.pipeline.timing import OpTimes, simulate

VARIANTS = ("1f1b", "gpipe", "zb-h1", "zb-h1+onednn", "zb-v", "torch", "data", "deepspeed")
NAMES = {
    "torch": "torch.distributed.pipelining, 1F1B",
    "data": "DistributedDataParallel, no pipeline",
    "deepspeed": "DeepSpeed's PipelineEngine",
}
_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 900.0
_RANKS = 2


def main(argv: list[str]) -> int:
    """Run every variant in each round, one after another, and print medians over all steps."""
    parser = argparse.ArgumentParser(prog="bench pipeline", description=__doc__)
    said = "of the model (default %(default)s), such as 126m; with -halves behind it blocks are two layers each"
    parser.add_argument("--size", default="29m", help=said)
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="of all variants (default 3)")
    parser.add_argument("--steps", type=int, default=6, help="of each variant in a round (default 6)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="(default: %(default)s)")
    parser.add_argument("--deepspeed", type=Path, metavar="PYTHON", help="an environment with DeepSpeed")
    options = parser.parse_args(argv)
    variants = options.variants.split(",")
    if options.deepspeed is None and "deepspeed" in variants:
        variants.remove("deepspeed")
    found: dict[str, list[Any]] = {variant: [] for variant in variants}
    for _ in range(options.rounds):
        for variant in variants:
            numbers = (options.micro_batches, options.steps)
            found[variant].append(measured(variant, options.size, *numbers, options.deepspeed))
    title = f"{options.size}, {options.micro_batches} micro-batches, two stages"
    columns = (
        "variant",
        "step ms",
        "min ms",
        "CPU ms",
        "makespan ms",
        "step over it",
        "bubble",
        "times 1f1b",
        "loss off by",
    )
    shown = make_table(title, columns)
    first = found.get("1f1b") or found[variants[0]]
    base = median(second for each in first for second in each["seconds"])
    for variant, rounds in found.items():
        seconds = [second for each in rounds for second in each["seconds"]]
        cpu = [second for each in rounds for second in each["cpu"]]
        schedule = variant.partition("+")[0]
        promised = [promise(schedule, options.micro_batches, each) for each in rounds if "tasks" in each]
        told = ["-", "-", "-"]
        if promised:
            makespan, bubble = (median(each) for each in zip(*promised, strict=True))
            told = [
                f"{makespan * 1e3:.1f}",
                f"{100 * (median(seconds) / makespan - 1):+.1f} %",
                f"{100 * bubble:.1f} %",
            ]
        off = max(abs(a - b) for a, b in zip(rounds[0]["losses"], first[0]["losses"], strict=True))
        shown.add_row(
            NAMES.get(variant, variant),
            *(f"{median(seconds) * 1e3:.1f}", f"{min(seconds) * 1e3:.1f}", f"{median(cpu) * 1e3:.1f}", *told),
            *(f"{base / median(seconds):.2f}", f"{off:.1e}"),
        )
    make_console().print(shown)
    if "deepspeed" not in variants:
        make_console().print(f"{NAMES['deepspeed']}: left out (--deepspeed PYTHON names its environment)")
    return 0


def promise(schedule: str, micro_batches: int, figures: Any) -> tuple[float, float]:
    """What the table says a step takes, if each task takes as long as its like did in the median, with the slowest
    stage's update; and the share of it in which stages wait."""
    table = make_pipeline(schedule, _RANKS, micro_batches)
    tasks: dict[str, float] = figures["tasks"]

    def times(op: PipelineOp) -> tuple[float, ...]:
        return tuple(tasks.get(f"{op.name} {chunk}", 0.0) for chunk in range(table.chunks))

    whole, parts = times(PipelineOp.BACKWARD), times(PipelineOp.BACKWARD_INPUT)
    later = times(PipelineOp.BACKWARD_WEIGHT)
    # Tables with both are told one sum: that of the two parts, which differs from the whole by little.
    first = tuple(part or whole_of for part, whole_of in zip(parts, whole, strict=True))
    timing = simulate(table, OpTimes(times(PipelineOp.FORWARD), first, later))
    return timing.makespan + figures["update"], timing.bubble_share


def measured(variant: str, size: str, micro_batches: int, steps: int, deepspeed: Path | None = None) -> Any:
    """What the last rank of a variant's job has measured."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "figures.json")
        numbers = [size, str(micro_batches), str(steps), str(result)]
        if variant == "deepspeed":
            figures = _of_deepspeed(str(deepspeed), numbers, result)
        else:
            ranks = ["--nproc", str(_RANKS)]
            figures = figures_of("bench.pipeline.worker", [variant, *numbers], result, ranks, _LIMIT_S)
        each = [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(_RANKS)]
        return {**figures, "cpu": [sum(step) for step in zip(*each, strict=True)]}


def _of_deepspeed(python: str, arguments: list[str], result: Path) -> Any:
    """What the ranks of DeepSpeed's engine, in its own environment, have written. They end by force, so only what they
    wrote counts."""
    start = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS)]
    job = subprocess.run(
        [*start, "-m", "bench.pipeline.deepspeed_worker", *arguments],
        cwd=_ROOT,
        env={**rank_environment(), "PYTHONPATH": str(_ROOT), "PATH": f"{Path(python).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if not result.exists():
        raise SystemExit(f"DeepSpeed gave no figures:\n{job.stdout[-2000:]}{job.stderr[-2000:]}")
    return json.loads(result.read_text())
