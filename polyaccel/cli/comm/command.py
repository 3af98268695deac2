"""`polyaccel comm diff` and `polyaccel comm bench`."""

from __future__ import annotations

import argparse

from polyaccel.cli.comm import bench, diff


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "look at what ranks recorded of their collectives, or measure how fast these are"
    parser = subparsers.add_parser("comm", help=summary, description=summary)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in (diff, bench):
        action.add_parser(actions)
