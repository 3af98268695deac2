"""`polyaccel comm`: what ranks recorded of their collectives, and how fast these are.

`polyaccel comm bench` is what a user types and what every rank runs: a process that a launcher has numbered measures,
any other starts the ranks by `polyaccel run`, each with this command and the options about the measurement.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyaccel.cli.argument_types import positive, whole_number
from polyaccel.cli.options import add_options
from polyaccel.comm.flight_recorder.desync import Divergence, as_text, find_desync
from polyaccel.comm.flight_recorder.dump import Dump, read_dump
from polyaccel.errors import CommError

if TYPE_CHECKING:
    from polyaccel.core.types import DType


_DESCRIPTION = """\
Measure the collectives of the communicator that a training would have: the time of a call, its size over that time
(algbw), and what crosses the slowest link in a second (busbw). Under a launcher (polyaccel run --module polyaccel comm
bench, mpirun, srun, torchrun) the ranks that it started measure; without one this command starts them, as polyaccel run
does. Rank 0 prints a table, and with --json writes it for `polyaccel plan --comm`."""
_OWN = ("smallest", "largest", "factor", "operations", "dtype", "rounds", "budget", "config", "json")


def add_bench_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "measure how fast the ranks of a job can move buffers"
    parser = subparsers.add_parser("bench", help=what, description=_DESCRIPTION, allow_abbrev=False)
    own = parser.add_argument_group("the measurement")
    seconds = positive("a number of seconds above 0", 1e6)
    size = _parsed("such as 1KiB or 64MiB")
    own.add_argument("--smallest", type=size, default="1KiB", metavar="SIZE", help="(default: %(default)s)")
    own.add_argument("--largest", type=size, default="64MiB", metavar="SIZE", help="(default: %(default)s)")
    own.add_argument("--factor", type=_above(2), default="4", metavar="N", help="between sizes (default: %(default)s)")
    own.add_argument("--operations", default=None, metavar="NAME,...", help="default: all")
    own.add_argument("--dtype", default="float32", metavar="TYPE", help="of the elements (default: %(default)s)")
    own.add_argument("--rounds", type=_above(3), default="20", metavar="N", help="at most (default: %(default)s)")
    own.add_argument("--budget", type=seconds, default="0.5", metavar="S", help="seconds a row (default: %(default)s)")
    own.add_argument("--config", metavar="FILE", help="a config whose `comm` and `accelerator` count")
    own.add_argument("--json", metavar="FILE", help="where rank 0 writes the table; - prints it instead")
    add_options(parser, with_script=False)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure, or start the ranks that do. Returns the exit code. Raises PolyaccelError."""
    from polyaccel.comm.benchmark import OPERATIONS, all_cases, sizes
    from polyaccel.comm.discovery import list_sources
    from polyaccel.core.types import DType

    operations = OPERATIONS if args.operations is None else args.operations.split(",")
    wanted = list(all_cases(operations, sizes(args.smallest, max(args.smallest, args.largest), args.factor)))
    dtype = DType.parse(args.dtype)
    if any(row.matched for row in list_sources()):
        return _measure(args, wanted, dtype)
    from polyaccel.cli.job import job_of
    from polyaccel.cli.run import count_ranks, run_job

    args.script, args.module, args.no_python, args.arguments = "polyaccel", True, False, ["comm", "bench", *_own(args)]
    return run_job(job_of(args, os.environ, lambda: max(2, count_ranks())), args)


def _own(args: argparse.Namespace) -> list[str]:
    """The options about the measurement, as a rank gets them."""
    given = {name: getattr(args, name) for name in _OWN}
    if args.json not in (None, "-"):
        given["json"] = str(Path(args.json).absolute())
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _measure(args: argparse.Namespace, wanted: Sequence[tuple[str, int]], dtype: DType) -> int:
    from polyaccel import comm
    from polyaccel.comm.benchmark import measured, shown
    from polyaccel.config import load_config

    comm.init_distributed(config=None if args.config is None else load_config(args.config), verbose=False)
    communicator = comm.default_communicator()
    table = measured(
        communicator,
        dtype,
        wanted,
        rounds=args.rounds,
        budget_s=args.budget,
        ranks_on_hosts=map(len, communicator.host_topology.ranks_by_host),
    )
    if communicator.rank == 0:
        if args.json not in (None, "-"):
            Path(args.json).write_text(table.to_json() + "\n", encoding="utf-8")
        print(table.to_json() if args.json == "-" else shown(table))
        sys.stdout.flush()
    comm.barrier()
    comm.destroy_process_group()
    return 0


def _parsed(what: str) -> Callable[[str], int]:
    from polyaccel.cli.plan.command import parse_size

    def size(text: str) -> int:
        nbytes = parse_size(text)
        if not 1 <= nbytes < 1 << 40:
            raise argparse.ArgumentTypeError(f"{text!r} is not a size {what}")
        return nbytes

    return size


def _above(least: int) -> Callable[[str], int]:
    return whole_number(f"a number from {least} on", least)


def add_diff_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "show where ranks diverged, from their dumps"
    diff = subparsers.add_parser("diff", help=what, description=what)
    diff.add_argument("dumps", nargs="+", type=Path, metavar="DUMP", help="rank-N.json files, or a folder of them")
    diff.set_defaults(func=run_diff)


def run_diff(args: argparse.Namespace) -> int:
    """Print the comparison; the exit code is 1 when ranks diverged. Raises CommError for what is not a dump."""
    dumps = list(read_all(args.dumps))
    findings = find_desync(dumps)
    print(as_text(findings, dumps))
    return int(any(isinstance(finding, Divergence) for finding in findings))


def read_all(places: Iterable[Path]) -> Iterable[Dump]:
    """The dumps in files and folders. Raises CommError when there is none, or two are of one rank."""
    files = [file for place in places for file in (sorted(place.glob("rank-*.json")) if place.is_dir() else [place])]
    if not files:
        raise CommError("there is no rank-N.json in the folder", hint="give the folder from the log line of a rank")
    found: dict[int, Path] = {}
    for file in files:
        dump = read_dump(file)
        if dump.rank in found:
            raise CommError(
                f"{found[dump.rank]} and {file} are both of rank {dump.rank}",
                hint="compare the dumps of one job",
                value=dump.rank,
            )
        found[dump.rank] = file
        yield dump


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "look at what ranks recorded of their collectives, or measure how fast these are"
    parser = subparsers.add_parser("comm", help=summary, description=summary)
    actions = parser.add_subparsers(dest="action", metavar="VERB", required=True)
    add_diff_parser(actions)
    add_bench_parser(actions)
