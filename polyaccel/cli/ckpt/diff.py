"""`polyaccel ckpt diff`: how far two checkpoints are apart, tensor by tensor."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from polyaccel.checkpoint.convert.diff import Difference, difference
from polyaccel.checkpoint.convert.locate import opened
from polyaccel.checkpoint.convert.verifying import checked_nbytes
from polyaccel.cli.ckpt.shown import add_storage, print_table, progress
from polyaccel.core.types import DType

_MOST_SHOWN = 8


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "compare two checkpoints, bit by bit and by number"
    description = f"{summary}. The exit code is 0 where all tensors and values are equal, else 1."
    parser = actions.add_parser("diff", help=summary, description=description)
    what = "a directory of checkpoints, whose latest is taken, or the folder of a tag in it"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument("--json", action="store_true", help="print one JSON object, equal tensors included")
    add_storage(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print what differs; the exit code is 1 where anything does. Raises CheckpointError for damage."""
    one, other = opened(args.a, storage=args.storage), opened(args.b, storage=args.storage)
    with progress("comparing", checked_nbytes(one)) as report:
        found = difference(one, other, report)
    if args.json:
        print(json.dumps({"is_equal": found.is_equal, **asdict(found)}, indent=2, default=_plain))
    else:
        _print(found)
    return int(not found.is_equal)


def _print(found: Difference) -> None:
    for where, keys in (("A", found.missing), ("B", found.extra)):
        for fqn, kind in keys:
            print(f"only in {where}: {fqn} ({kind})")
    apart = [each for each in found.tensors if not each.is_equal]
    rows = [
        (
            each.fqn,
            each.kind,
            _pair(*each.dtypes),
            _pair(*(list(shape) for shape in each.shapes)),
            "-" if each.largest is None else f"{each.largest:.3g}",
            "-" if each.relative is None else f"{each.relative:.3g}",
        )
        for each in apart
    ]
    if rows:
        print_table(("tensor", "kind", "type", "shape", "largest |a - b|", "relative"), rows, right=(4, 5))
    for key, (ours, theirs) in list(found.scalars.items())[:_MOST_SHOWN]:
        print(f"{key}: {ours!r:.80} -> {theirs!r:.80}")
    if len(found.scalars) > _MOST_SHOWN:
        print(f"and {len(found.scalars) - _MOST_SHOWN} more values")
    equal = len(found.tensors) - len(apart)
    print(
        f"{equal} tensors equal bit by bit, {len(apart)} not; {len(found.missing)} only in A, {len(found.extra)} in B"
    )


def _pair(one: Any, other: Any) -> str:
    one, other = (each.value if isinstance(each, DType) else str(each) for each in (one, other))
    return one if one == other else f"{one} / {other}"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, DType) else repr(value)
