"""Runner of all benchmarks: `Case` declares what is compared, `run_case` launches, interleaves and prints it.

The standard library only at its top: ranks in environments of peers import the files of cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from bench.machine import describe_machine
from bench.measure import rotated

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
_LAST_LINES = 12
_GRACE_S = 20.0
_QUIET_CPUS = 0.1
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a command. The type follows from the default: a tuple is a comma-separated list, `Path` is a path that
    may be left out, whole numbers without `choices` begin at 1."""

    default: Any
    help: str = ""
    choices: Collection[Any] | None = None

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add this option as `--name`."""
        flag, default = f"--{name.replace('_', '-')}", self.default
        if default is False:
            parser.add_argument(flag, action="store_true", help=self.help)
        elif default is Path:
            parser.add_argument(flag, type=Path, metavar="FILE", help=self.help)
        elif isinstance(default, tuple):
            item = positive if isinstance(default[0], int) else one_of(self.choices) if self.choices else str
            text = ",".join(map(str, default))
            parser.add_argument(flag, type=listed(item), default=text, help=f"{self.help} (default: %(default)s)")
        else:
            is_count = isinstance(default, int) and self.choices is None
            kind: Any = positive if is_count else type(default)
            about = f"{self.help} (default: %(default)s)"
            parser.add_argument(flag, type=kind, choices=self.choices, default=default, help=about)


Options = Mapping[str, Option]


@dataclass(frozen=True, slots=True)
class Start:
    """Launch of the ranks of a variant: by `polyaccel run`, torchrun, mpirun, or as one process ("python").

    `python` is the interpreter of another environment. `options` replace `--nproc` of `polyaccel run`.
    """

    ranks: int = 2
    launcher: str = "polyaccel"
    python: Path = Path(sys.executable)
    environ: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command whose arguments are those of `bench.rank`."""
        python = str(self.python)
        if self.launcher == "polyaccel":
            where = self.options or ("--nproc", str(self.ranks))
            return [python, "-m", "polyaccel", "run", *where, "--module", "bench.rank"]
        if self.launcher == "torchrun":
            torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
            return [*torchrun, "-m", "bench.rank"]
        mpirun = [str(self.python.with_name("mpirun")), "-n", str(self.ranks)] if self.launcher == "mpirun" else []
        return [*mpirun, python, "-m", "bench.rank"]


class LaunchError(Exception):
    """Launch whose ranks failed, or returned no figures."""


def launch(case: str, variant: str, settings: Settings, start: Start, limit_s: float = 900.0) -> list[Any]:
    """Run `bench.cases.CASE.work(variant, settings)` in all ranks; return the figures of each. Raises LaunchError."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result, log = Path(folder, "figures"), Path(folder, "log")
        arguments = [case, variant, json.dumps(settings, default=str), str(result)]
        environ = {**rank_environment(start.python), **start.environ}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*start.command(), *arguments],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code: object = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = f"timed out after {limit_s:.0f} s"
            finally:
                end(process)
        files = [Path(f"{result}.{rank}") for rank in range(start.ranks)]
        if code or not all(file.exists() for file in files):
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise LaunchError(f"{variant} failed: {code or 'no figures'}\n{last}")
        return [json.loads(file.read_text()) for file in files]


def rank_environment(python: Path = Path(sys.executable)) -> dict[str, str]:
    """Return the variables of every rank: one thread, on the CPU, with the compilers of the interpreter's folder."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "POLYACCEL_VERIFY": "off",
        "PYTHONPATH": str(ROOT),
        "PATH": path,
    }
    return {**os.environ, **own, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def end(process: subprocess.Popen[Any]) -> None:
    """End a launcher, which ends its ranks."""
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Runs:
    """Figures of a variant by round, those of each rank."""

    variant: str
    settings: Settings
    rounds: dict[int, list[Any]] = field(default_factory=dict)

    def every(self, name: str, rank: int = 0) -> list[Any]:
        """Return the items of the list `name` of one rank, over all rounds."""
        return [item for ranks in self.rounds.values() for item in ranks[rank][name]]

    def means(self, name: str) -> list[float]:
        """Return the items of the list `name`, each as the mean over ranks, over all rounds."""
        return [fmean(item) for ranks in self.rounds.values() for item in _zipped(ranks, name)]

    def values(self, name: str) -> list[Any]:
        """Return the figure `name` of every rank and round."""
        return [rank[name] for ranks in self.rounds.values() for rank in ranks]

    def losses(self) -> list[list[float]]:
        """Return the losses of each round, as means over ranks."""
        return [[fmean(step) for step in _zipped(ranks, "losses")] for ranks in self.rounds.values()]

    def other_cpus(self) -> float:
        """Return the CPUs that other jobs used, in the round with the most."""
        shares = [0.0]
        for ranks in self.rounds.values():
            if "busy" in ranks[0]:
                own = sum(fmean(rank["cpu"]) / fmean(rank["seconds"]) for rank in ranks)
                shares.append(ranks[0]["busy"] - own)
        return max(shares)


def _zipped(ranks: Sequence[Any], name: str) -> Iterable[tuple[float, ...]]:
    return zip(*(rank[name] for rank in ranks), strict=True)


Found = Mapping[str, Runs]
Column = Callable[[Runs, Found], str]


def ms(name: str = "seconds", best: bool = False) -> Column:
    """Return a column of milliseconds: the median over steps and rounds, or the least, of means over ranks."""
    return lambda own, found: f"{1e3 * (min if best else median)(own.means(name)):.1f}"


def speed(base: str, name: str = "seconds") -> Column:
    """Return a column of the median of `base` over the variant's: above 1 is faster."""
    return lambda own, found: (
        f"{median(found[base].means(name)) / median(own.means(name)):.2f}" if base in found else "-"
    )


def mib(name: str, scale: float = MIB) -> Column:
    """Return a column of the highest figure `name` of all ranks and rounds in MiB."""
    return lambda own, found: f"{max(own.values(name)) / scale:.0f}"


def losses_off(own: Runs, base: Runs, steps: int | None = None) -> float:
    """Return the largest distance of a loss, of the first `steps` if given, from that of the same step of `base`."""
    wanted = base.losses()[0][:steps]
    distances = [abs(a - b) for losses in own.losses() for a, b in zip(losses[:steps], wanted, strict=True)]
    return max(distance if distance < float("inf") else float("inf") for distance in distances)


@dataclass(frozen=True, slots=True)
class Case:
    """Comparison of variants, launched in turn in every round.

    `variants` returns how each is launched, or why it is absent. `settings` returns what is compared, one table each.
    `around` holds what all launches need. `prepare` fits the start of a variant to it and to a table; None leaves the
    variant out. `is_wrong` marks a variant whose results differ; then the command returns 1. `verdict` returns a last
    line and whether a limit is missed. `work` names the module of `bench.cases` for the ranks, `name` by default.
    """

    name: str
    about: str
    options: Options
    variants: Callable[[argparse.Namespace], Mapping[str, Start | str]]
    columns: Callable[[Settings], Mapping[str, Column]]
    title: str
    settings: Callable[[argparse.Namespace], Sequence[Settings]] = lambda args: [vars(args)]
    rounds: int = 3
    default: tuple[str, ...] = ()
    is_wrong: Callable[[Runs, Found], bool] | None = None
    verdict: Callable[[Found], tuple[str, bool]] | None = None
    work: str = ""
    around: Callable[[argparse.Namespace], AbstractContextManager[Any]] = lambda args: nullcontext()
    prepare: Callable[[Settings, Start, Any], Start | None] = lambda settings, start, place: start


def run_case(case: Case, argv: Sequence[str]) -> int:
    """Run the command of a case; return 1 if a variant failed or computed other numbers, or a limit is missed."""
    impl = Option(case.default or ("all",), "variants")
    common = {"rounds": Option(case.rounds, "launches of each variant"), "impl": impl, "out": OUT}
    args = parse(case.name, case.about, {**case.options, **common}, argv)
    every = case.variants(args)
    names = list(every) if args.impl == ("all",) else list(args.impl)
    if unknown := [name for name in names if name not in every]:
        raise SystemExit(f"unknown variants: {', '.join(unknown)}; choose from {', '.join(every)}")
    starts = {name: start for name in names if isinstance(start := every[name], Start)}
    begin()
    for name in names:
        if name not in starts:
            say(f"{name} skipped: {every[name]}")
    if not starts:
        raise SystemExit("nothing to measure: install what was skipped, or select other variants with --impl")
    settings = case.settings(args)
    tables = [{name: Runs(name, of_table) for name in starts} for of_table in settings]
    failed = False
    try:
        with case.around(args) as place:
            for turn in range(args.rounds):
                for of_table, runs in zip(settings, tables, strict=True):
                    for name in rotated(list(starts), turn):
                        label = f"round {turn + 1}, {case.title.format(**of_table)}, {name}"
                        prepared = case.prepare(of_table, starts[name], place)
                        if prepared is None:
                            continue
                        try:
                            runs[name].rounds[turn] = launch(case.work or case.name, name, of_table, prepared)
                        except LaunchError as error:
                            failed = True
                            say(f"{label}: {error}")
                            continue
                        say(label)
                        record(args.out, label, runs[name].rounds[turn])
    except KeyboardInterrupt:
        say("interrupted")
    for of_table, runs in zip(settings, tables, strict=True):
        failed |= _show(case, of_table, {name: own for name, own in runs.items() if own.rounds})
    return int(failed)


def _show(case: Case, settings: Settings, found: Found) -> bool:
    """Print a table; return whether a variant is wrong or a limit is missed."""
    columns, rows, failed = case.columns(settings), [], False
    for name, own in found.items():
        notes = []
        if case.is_wrong is not None and case.is_wrong(own, found):
            notes, failed = ["WRONG"], True
        if (others := own.other_cpus()) > _QUIET_CPUS:
            notes.append(f"others used {others:.1f} CPUs")
        rows.append([name, *(column(own, found) for column in columns.values()), ", ".join(notes)])
    table(case.title.format(**settings), ["variant", *columns, "note"], rows)
    if case.verdict is not None and found:
        line, is_missed = case.verdict(found)
        say(line)
        failed |= is_missed
    return failed


OUT = Option(Path, "append the figures as JSON lines")
DEEPSPEED = Option(Path, "Python of an environment with DeepSpeed")


def deepspeed_start(args: argparse.Namespace) -> Start | str:
    """Return the start of a variant of DeepSpeed in its own environment, or why it is absent."""
    if args.deepspeed is None:
        return "needs --deepspeed PYTHON"
    return Start(launcher="torchrun", python=args.deepspeed)


def parse(name: str, about: str, options: Options, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command."""
    prog = f"python -m bench {name}" if name != "steps" else "python -m bench"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=about, formatter_class=formatter)
    for option, spec in options.items():
        spec.add_to(parser, option)
    return parser.parse_args(argv)


def begin() -> None:
    """Print the machine."""
    say(describe_machine())


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def record(out: Path | None, label: str, figures: Any) -> None:
    """Append figures to the file of `--out`."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps({"label": label, "machine": describe_machine(), "figures": figures}) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table with aligned columns; the first is text, the others are figures."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    say(f"\n{title}\n")
    for number, line in enumerate(lines):
        first, *rest = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        say(f"| {' | '.join(cells)} |")
        if not number:
            say("|" + "|".join(f"{'-' * (width + 1)}{'-:'[bool(at)]}" for at, width in enumerate(widths)) + "|")


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return the argparse type of a comma-separated list without repetitions."""
    return lambda text: tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Return the argparse type of one of `names`."""

    def parse_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse_name


def positive(text: str) -> int:
    """Parse a whole number from 1, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
