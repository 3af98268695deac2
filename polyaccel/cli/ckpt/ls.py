"""`polyaccel ckpt ls`: the tags of a directory, and which of them a run can continue from."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from polyaccel.checkpoint import Storage, TagStatus, open_checkpoint
from polyaccel.checkpoint.convert.locate import listed, split
from polyaccel.checkpoint.format.commit import read_latest
from polyaccel.cli.ckpt.shown import add_storage, print_table
from polyaccel.errors import CheckpointError
from polyaccel.utils.sizes import size


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "list the checkpoints of a directory, newest first"
    description = f"{summary}. '*' is the one that `latest` names. The exit code is 1 where none is good."
    parser = actions.add_parser("ls", help=summary, description=description)
    parser.add_argument("dir", metavar="DIR", help="the directory that save_checkpoint was given")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    add_storage(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print a line for each tag. Raises CheckpointError for a directory without checkpoints."""
    statuses = listed(args.dir, args.storage)
    storage, _ = split(args.dir, None, args.storage)
    latest = _latest(storage)
    rows = [_row(storage, status, latest) for status in statuses]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        cells = [
            (
                f"{row['tag']} *" if row["is_latest"] else row["tag"],
                f"{datetime.fromtimestamp(row['saved_at_s']):%Y-%m-%d %H:%M:%S}" if row["saved_at_s"] else "-",
                _or_dash(row["ranks"]),
                _or_dash(row["step"]),
                "-" if row["nbytes"] is None else size(row["nbytes"]),
                row["state"],
            )
            for row in rows
        ]
        print_table(("tag", "saved at", "ranks", "step", "size", "state"), cells, right=(2, 3, 4))
    return int(not any(status.is_good for status in statuses))


def step_of(scalars: dict[str, Any]) -> int | None:
    """Return the number of optimizer steps in the plain values of a checkpoint; None without one."""
    counters = scalars.get("counters")
    step = counters.get("global_steps") if isinstance(counters, dict) else None
    return step if isinstance(step, int) else None


def _row(storage: Storage, status: TagStatus, latest: str | None) -> dict[str, Any]:
    ranks = step = nbytes = None
    if not status.problem:
        reader = open_checkpoint(storage, status.tag)
        ranks, step = reader.world_size, step_of(reader.scalars)
        nbytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in reader.tensors())
    state = f"not finite: {status.not_finite}" if status.not_finite else "good"
    return {
        "tag": status.tag,
        "is_latest": status.tag == latest,
        "saved_at_s": status.saved_at_s,
        "ranks": ranks,
        "step": step,
        "nbytes": nbytes,
        "state": f"problem: {status.problem.splitlines()[0]}" if status.problem else state,
    }


def _latest(storage: Storage) -> str | None:
    try:
        return read_latest(storage)
    except CheckpointError:
        return None


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
