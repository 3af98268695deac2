"""`polyaccel ckpt verify`: is every byte of a checkpoint as it was written?"""

from __future__ import annotations

import argparse

from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.convert.locate import listed, split
from polyaccel.checkpoint.convert.verifying import checked_nbytes, verified
from polyaccel.cli.ckpt.shown import add_storage, progress
from polyaccel.utils.sizes import size


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "read a checkpoint and compare every checksum"
    description = f"{summary}. Damage is named by file, parameter and elements; the exit code is then 1."
    parser = actions.add_parser("verify", help=summary, description=description)
    parser.add_argument("dir", metavar="DIR", help="a directory of checkpoints, or the folder of a tag in it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tag", help="the checkpoint (default: the one that `latest` names)")
    which.add_argument("--all", action="store_true", help="every checkpoint of the directory")
    add_storage(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print a line for each checkpoint, and one for each damage. Raises CheckpointError for one that cannot be read."""
    is_whole = True
    directory, tag = split(args.dir, args.tag, args.storage)
    tags = [tag]
    if args.all:
        statuses = listed(args.dir, args.storage)
        for status in statuses:
            if status.problem:
                is_whole = False
                print(f"{status.tag}: {status.problem}")
        tags = [status.tag for status in statuses if not status.problem]
    for each in tags:
        reader = open_checkpoint(directory, each)
        with progress(f"verifying {reader.tag}", checked_nbytes(reader)) as report:
            verdict = verified(reader, report)
        rate = f"{size(verdict.nbytes / verdict.seconds)}/s"
        state = f"{len(verdict.damages)} damaged" if verdict.damages else "whole"
        rest = f"; {size(verdict.elsewhere_nbytes)} on other hosts" if verdict.elsewhere_nbytes else ""
        print(f"{verdict.tag}: {state}; {size(verdict.nbytes)} in {verdict.seconds:.2f} s, {rate}{rest}")
        for damage in verdict.damages:
            print(f"  {damage}")
        is_whole = is_whole and not verdict.damages
    return int(not is_whole)
