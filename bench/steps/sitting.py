"""One sitting: the same variants and cases, round after round, every run written down as it ends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from rich.console import Console

from bench.machine import describe_machine
from bench.steps.cases import DTYPES, SHAPES, VARIANTS, Case, Job, Run
from bench.steps.launch import Failure, run_job, why_absent

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Sitting:
    """What is to be run."""

    cases: tuple[Case, ...]
    variants: tuple[str, ...]
    warmup: int
    steps: int
    rounds: int

    def jobs(self) -> Iterator[Job]:
        """Case by case within a round. Each round begins with another variant, so that none always comes first."""
        for index in range(self.rounds):
            turn = index % len(self.variants)
            order = (*self.variants[turn:], *self.variants[:turn])
            for case in self.cases:
                for variant in order:
                    yield Job(variant, case, self.warmup, self.steps, index)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a command measures unless told otherwise."""

    micro_batches: str
    dtypes: str
    variants: str
    warmup: int
    steps: int
    rounds: int


def add_arguments(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
    """The options of every command that trains."""
    sizes, names = ", ".join(SHAPES), ", ".join(VARIANTS)
    parser.add_argument("--size", choices=SHAPES, default="29m", help=f"model: {sizes} (default: %(default)s)")
    parser.add_argument(
        "--micro-batch",
        type=listed(positive),
        default=defaults.micro_batches,
        metavar="N,...",
        help="sequences a rank and step (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", type=listed(one_of(DTYPES)), default=defaults.dtypes, help="fp32, bf16 (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks",
        type=listed(positive),
        default="2",
        metavar="N,...",
        help="processes, each of one thread; more than cores share them (default: %(default)s)",
    )
    parser.add_argument(
        "--impl",
        type=listed(one_of(VARIANTS)),
        default=defaults.variants,
        metavar="NAME,...",
        help=f"variants among {names} (default: %(default)s)",
    )
    parser.add_argument("--steps", type=positive, default=defaults.steps, help="measured (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=positive, default=defaults.warmup, help="steps before that (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=positive, default=defaults.rounds, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the sitting and its runs as JSON lines")


def read_arguments(args: argparse.Namespace, console: Console) -> Sitting:
    """The sitting that the options describe, less what is not installed, which is said. Exits if nothing is left."""
    present = []
    for name in args.impl:
        reason = why_absent(VARIANTS[name])
        if reason is None:
            present.append(name)
        else:
            console.print(f"{name} skipped: {reason}")
    if not present:
        raise SystemExit("nothing to measure: install what was skipped, or name other variants with --impl")
    cases = tuple(
        Case(args.size, batch, dtype, ranks)
        for ranks in args.ranks
        for dtype in args.dtype
        for batch in args.micro_batch
    )
    return Sitting(cases, tuple(present), args.warmup, args.steps, args.rounds)


def hold(sitting: Sitting, console: Console, out: Path | None) -> tuple[list[Run], bool]:
    """Run every job; returns the runs, and whether any gave no figures or, if it was one of ours, ended badly.

    An interrupted sitting returns what it has measured so far.
    """
    machine = describe_machine()
    console.print(str(machine), markup=False)
    _append(out, {"sitting": asdict(sitting), "machine": asdict(machine)})
    runs, failed = list[Run](), False
    jobs = list(sitting.jobs())
    try:
        for number, job in enumerate(jobs, 1):
            began = perf_counter()
            outcome = run_job(job)
            label = f"[{number}/{len(jobs)}] round {job.round + 1}, {job.case}, {job.variant}"
            if isinstance(outcome, Failure):
                console.print(f"{label}: FAILED, {outcome.reason}\n{outcome.output}", markup=False)
                failed |= outcome.run is None or VARIANTS[job.variant].family == "polyaccel"
            run = outcome.run if isinstance(outcome, Failure) else outcome
            if run is not None:
                runs.append(run)
                _append(out, {"run": asdict(run)})
                spent_s = perf_counter() - began
                console.print(f"{label}: min {min(run.step_s):.4f} s a step ({spent_s:.0f} s)", markup=False)
    except KeyboardInterrupt:
        console.print("interrupted")
    return runs, failed


def _append(out: Path | None, line: Mapping[str, object]) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def listed(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """The argparse type of a comma-separated list without repetitions."""

    def parse(text: str) -> tuple[_T, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    return parse


def one_of(names: Sequence[str] | Mapping[str, object]) -> Callable[[str], str]:
    """The argparse type of one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def positive(text: str) -> int:
    """The argparse type of a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
