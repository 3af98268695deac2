"""`polyaccel ckpt import`: the files of another tool as a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from polyaccel.checkpoint.convert.exporting import BUFFER
from polyaccel.checkpoint.convert.importers import find_importer
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, imported
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.cli.ckpt.shown import progress
from polyaccel.errors import CheckpointError
from polyaccel.utils.sizes import size


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "make a checkpoint of the files of another tool"
    description = (
        f"{summary}, which an engine loads like one that it saved. Safetensors, bin, dcp, orbax and flax are built in; "
        "packages bring others, for example polyaccel-deepspeed: deepspeed."
    )
    parser = actions.add_parser("import", help=summary, description=description)
    parser.add_argument("src", metavar="SRC", type=Path, help="a file, or the folder of a model or checkpoint")
    parser.add_argument("dir", metavar="DIR", help="the directory of checkpoints to write to")
    parser.add_argument("--from", dest="source", metavar="FORMAT", required=True, help="whose files they are")
    only = "take parameters and buffers, and leave out an optimizer, a schedule and counts without an error"
    parser.add_argument("--weights-only", action="store_true", help=only)
    parser.add_argument("--tag", default="imported", help="the name of the checkpoint (default: %(default)s)")
    what = "tensors whose names match are buffers, for example '*.running_*'; integers are anyway; may be given again"
    parser.add_argument("--buffer", action="append", default=[], metavar="PATTERN", help=what)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, print what it has and lacks, and return 0."""
    source: Path = args.src
    read = find_importer(args.source)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist", hint="give a file or a folder", value=str(source))
    incoming = read(source)
    if args.weights_only:
        incoming = incoming.weights()
    elif needed := [each for each in incoming.left_out if each.is_needed]:
        what = "; ".join(f"{each.name}: {each.why}" for each in needed[:8])
        raise CheckpointError(
            f"{source} has an optimizer state or a schedule that is not taken over: {what}",
            hint="give --weights-only to begin with a new optimizer and schedule",
            value=[each.name for each in needed],
        )
    if incoming.run is None or args.buffer:
        incoming = replace(incoming, tensors=[_as_buffer(tensor, args.buffer) for tensor in incoming.tensors])
    nbytes = sum(_nbytes(tensor) for tensor in incoming.tensors)
    with progress(f"importing {source}", nbytes) as report:
        commit = imported(incoming, args.dir, args.tag, f"{args.source}: {source}", report)
    kinds = ", ".join(sorted({tensor.kind for tensor in incoming.tensors}))
    print(f"{args.dir}/{commit.tag}: {len(incoming.tensors)} tensors ({kinds}), {size(nbytes)}")
    print(f"taken over: {', '.join(_taken(incoming))}")
    if incoming.left_out:
        print(f"left out: {'; '.join(f'{each.name} ({each.why})' for each in incoming.left_out)}")
    return 0


def _taken(incoming: Incoming) -> list[str]:
    """What an import has, in the words of its line."""
    taken = ["parameters and buffers"]
    if incoming.run is not None:
        return [*taken, "all of the run"]
    if incoming.groups is not None:
        has_counts = incoming.counters or any("step" in numbers for numbers in incoming.numbers.values())
        updates = f" after {max(incoming.steps.values())} updates" if incoming.steps and has_counts else ""
        updates = updates if incoming.steps else " without states"
        taken.append(f"the optimizer {incoming.family or 'of an unknown kind'}{updates}")
    if incoming.lr_scheduler is not None or incoming.blobs:
        taken.append("the schedule")
    if step := incoming.counters.get("global_steps"):
        taken.append(f"the count of {step} steps")
    if incoming.loss_scaler:
        taken.append("the loss scale")
    if incoming.client_state:
        taken.append(f"client_state ({', '.join(sorted(incoming.client_state))})")
    return taken


def _as_buffer(tensor: ImportTensor, patterns: Sequence[str]) -> ImportTensor:
    is_buffer = not tensor.dtype.is_floating or any(fnmatchcase(tensor.fqn, pattern) for pattern in patterns)
    return replace(tensor, kind=BUFFER) if tensor.kind == PARAM and is_buffer else tensor


def _nbytes(tensor: ImportTensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize
