"""The longest sequence that a small Llama trains on within a limit of memory a rank, on two ranks: plain ZeRO-3, with
what this project has for long sequences, and DeepSpeed's ALST.

Peaks are those that the system counts of a rank's process (VmHWM), the interpreter, torch and transformers included.
They grow evenly with the length, so each trial is where a line through the last two meets the limit; a way is done when
the longest that fits and the shortest that does not are within a few percent, or at `--most`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from bench.machine import describe_machine
from bench.steps.sitting import positive
from bench.table import make_console, make_table

_ROOT = Path(__file__).resolve().parents[2]
_WORKER = str(Path(__file__).with_name("longest_worker.py"))
_PEERS_WORKER = str(Path(__file__).with_name("alst_worker.py"))
_LIMIT_S = 1800.0
_NEAR = 0.04
_STEP = 64
_NAMES = {
    "plain": "ZeRO-3",
    "recomputed": "and recomputation",
    "sequence": "ZeRO-3, sequence over both ranks",
    "sequence-recomputed": "and recomputation",
    "tiles": "and tiles",
    "alst": "DeepSpeed's ALST",
}
_NEAR_LOSS = {"alst": 1e-3}
"""How far a way's loss may be from the others'; 1e-4 where nothing is said."""


@dataclass(frozen=True)
class Trial:
    """Two steps on sequences of `length`: the higher peak of both ranks in bytes, the last loss, seconds of a step."""

    length: int
    peak: int
    loss: float
    seconds: float


def main(argv: Sequence[str]) -> int:
    """`python -m bench longest`. 1 if a way computed another loss than the others at the first length."""
    parser = argparse.ArgumentParser(prog="python -m bench longest", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of memory a rank (default: %(default)s)")
    parser.add_argument("--first", type=positive, default=1024, help="tokens of the first trial (default: %(default)s)")
    parser.add_argument("--most", type=positive, default=65_536, help="tokens to go to (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(_NAMES), help="default: %(default)s")
    parser.add_argument("--deepspeed", type=Path, metavar="PYTHON", help="an environment with DeepSpeed, for alst")
    args = parser.parse_args(argv)
    ways = [way for way in args.ways.split(",") if way != "alst" or args.deepspeed is not None]
    console = make_console()
    console.print(str(describe_machine()))
    limit = int(args.gigabytes * 2**30)
    table = make_table(
        f"longest sequence within {args.gigabytes:g} GiB a rank, two ranks, fp32, {args.first} to {args.most} tokens",
        ("way", "tokens", "times", "peak MiB", "s a step", "bytes a token", f"loss at {args.first}"),
    )
    first: Trial | None = None
    base = 0
    is_wrong = False
    for way in ways:
        trials = search(way, args, limit, console)
        best = max((one for one in trials if one.peak <= limit), key=lambda one: one.length, default=trials[0])
        first, base = first or trials[0], base or best.length
        is_wrong |= abs(trials[0].loss - first.loss) > _NEAR_LOSS.get(way, 1e-4)
        low, high = min(trials, key=lambda one: one.length), max(trials, key=lambda one: one.length)
        slope = (high.peak - low.peak) / max(1, high.length - low.length)
        more = " or more" if best.length >= args.most else ""
        row = _NAMES[way], f"{best.length}{more}", f"{best.length / base:.1f}", f"{best.peak / 2**20:.0f}"
        table.add_row(*row, f"{best.seconds:.1f}", f"{slope:.0f}", f"{trials[0].loss:.5f}")
    console.print(table)
    return int(is_wrong)


def search(way: str, args: argparse.Namespace, limit: int, console: Console) -> list[Trial]:
    """All trials of `way`, the first ones at `args.first` tokens and twice that."""
    trials: list[Trial] = []
    first, most = args.first, args.most
    length = first
    while not any(one.length == length for one in trials):
        trial = measure(way, length, args.deepspeed)
        console.print(f"{way}, {length} tokens: {trial.peak / 2**20:.0f} MiB, {trial.seconds:.1f} s a step")
        trials.append(trial)
        fits = max((one.length for one in trials if one.peak <= limit), default=0)
        fails = min((one.length for one in trials if one.peak > limit), default=most + _STEP)
        if fails <= fits * (1 + _NEAR) or fits >= most:
            break
        *_, low, high = [trial, *sorted(trials, key=lambda one: one.length)]
        length = 2 * first if len(trials) == 1 else _meeting(low, high, limit)
        length = max(fits + _STEP, min(length, most, fails - _STEP, 8 * max(fits, first)))
        length -= length % _STEP
    return trials


def _meeting(low: Trial, high: Trial, limit: int) -> int:
    """Where a line through two peaks meets the limit."""
    slope = max(1.0, (high.peak - low.peak) / (high.length - low.length))
    return int(high.length + (limit - high.peak) / slope)


def measure(way: str, length: int, deepspeed: Path | None) -> Trial:
    """One launch of `way`; `deepspeed` is the interpreter of the peer's."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "result")
        start = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", _WORKER, str(result), way, str(length)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(_ROOT)}
        if way == "alst" and deepspeed is not None:
            run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            start = [str(deepspeed), *run, _PEERS_WORKER, str(result), str(length)]
            environ |= {"PYTHONPATH": "", "PATH": f"{deepspeed.parent}{os.pathsep}{environ['PATH']}"}
        job = subprocess.run(start, cwd=folder, env=environ, capture_output=True, text=True, timeout=_LIMIT_S)
        files = [result.with_name(f"result.{rank}") for rank in range(2)]
        if not all(file.exists() for file in files):
            raise SystemExit(f"{way} gave no figures:\n{job.stdout}{job.stderr}")
        ranks = [json.loads(file.read_text()) for file in files]
        loss = sum(rank["loss"] for rank in ranks) / 2
        return Trial(length, max(rank["peak"] for rank in ranks), loss, max(rank["seconds"] for rank in ranks))
