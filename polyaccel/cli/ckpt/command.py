"""`polyaccel ckpt`: looking at checkpoints, comparing and exchanging them. No verb imports a framework, unless the
format that is asked for is one's own."""

from __future__ import annotations

import argparse

from polyaccel.cli.ckpt import diff, export, import_, inspecting, ls, reshard, verify

_DESCRIPTION = """\
Look at checkpoints, verify, compare and exchange them. DIR is the directory that `save_checkpoint` was given; the
folder of a tag in it means that checkpoint. Without a tag the one that `latest` names is taken."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "list, inspect, verify, compare, export and import checkpoints"
    parser = subparsers.add_parser("ckpt", help=summary, description=_DESCRIPTION)
    actions = parser.add_subparsers(dest="action", metavar="VERB", required=True)
    for action in (ls, inspecting, verify, diff, reshard, export, import_):
        action.add_parser(actions)
