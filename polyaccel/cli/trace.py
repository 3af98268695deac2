"""`polyaccel trace`: where the time of traced steps went."""

from __future__ import annotations

import argparse
from pathlib import Path

from polyaccel.observability.run_log import TRACE_FILE
from polyaccel.observability.traces.chrome import read_trace
from polyaccel.observability.traces.report import report_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "show where the time of traced steps went: exposed communication, late ranks, the critical path"
    parser = subparsers.add_parser("trace", help=what, description=what)
    parser.add_argument("place", type=Path, metavar="FOLDER", help=f"a run's folder, or its {TRACE_FILE}")
    parser.set_defaults(func=run_trace)


def run_trace(args: argparse.Namespace) -> int:
    """Print the report. Raises PolyaccelError for what is not a trace."""
    print(report_of(read_trace(args.place / TRACE_FILE if args.place.is_dir() else args.place)))
    return 0
