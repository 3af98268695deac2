"""`polyaccel comm diff`: where the ranks of a hanging or failed job diverged, from their flight recorders."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from polyaccel.comm.flight_recorder.desync import Divergence, as_text, find_desync
from polyaccel.comm.flight_recorder.dump import Dump, read_dump
from polyaccel.errors import CommError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
