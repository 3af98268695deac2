"""`polyaccel ckpt reshard`: a checkpoint written again, as the files of another number of ranks."""

from __future__ import annotations

import argparse

from polyaccel.checkpoint.convert.locate import opened
from polyaccel.checkpoint.convert.resharding import resharded
from polyaccel.checkpoint.convert.verifying import checked_nbytes
from polyaccel.cli.ckpt.shown import add_storage, progress
from polyaccel.utils.sizes import size


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "write a checkpoint again in today's format, as the files of N ranks"
    description = f"{summary}. Any number of ranks loads any checkpoint: this is for tools that want other files."
    parser = actions.add_parser("reshard", help=summary, description=description)
    parser.add_argument("dir", metavar="DIR", help="a directory of checkpoints, or the folder of a tag in it")
    parser.add_argument("out", metavar="OUT", help="the directory of checkpoints to write to")
    parser.add_argument("--ranks", type=int, metavar="N", help="files to write (default: as many as it has)")
    parser.add_argument("--tag", help="the checkpoint (default: the one that `latest` names)")
    add_storage(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint under its tag and print a line; the exit code is 0. Raises CheckpointError for damage."""
    reader = opened(args.dir, args.tag, args.storage)
    ranks = reader.world_size if args.ranks is None else args.ranks
    nbytes = checked_nbytes(reader)
    with progress(f"writing {reader.tag}", nbytes) as report:
        commit = resharded(reader, args.out, reader.tag, ranks, report)
    print(f"{args.out}/{commit.tag}: {size(nbytes)} in the files of {ranks} rank{'' if ranks == 1 else 's'}")
    return 0
