"""`polyaccel ckpt import`: the files of another tool as a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import metadata
from math import prod
from pathlib import Path

from polyaccel.checkpoint.tensors import PARAM
from polyaccel.cli.ckpt.shown import progress, size
from polyaccel.errors import CheckpointError
from polyaccel.exchange.exporting import BUFFER
from polyaccel.exchange.importing import Incoming, InTensor, imported

GROUP = "polyaccel.importers"
"""Entry points of packages that read more formats: functions from a path to an `Incoming`."""


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "make a checkpoint of the files of another tool"
    description = (
        f"{summary}, which an engine loads like one of its own. Safetensors, bin, dcp and orbax are built in; packages "
        "bring others, such as polyaccel-deepspeed: deepspeed."
    )
    parser = actions.add_parser("import", help=summary, description=description)
    parser.add_argument("src", metavar="SRC", type=Path, help="a file, or the folder of a model or checkpoint")
    parser.add_argument("dir", metavar="DIR", help="the directory of checkpoints to write to")
    parser.add_argument("--from", dest="source", metavar="FORMAT", required=True, help="whose files they are")
    parser.add_argument("--tag", default="imported", help="the name of the checkpoint (default: %(default)s)")
    what = "tensors whose names match are buffers, such as '*.running_*'; integers are anyway; may be given again"
    parser.add_argument("--buffer", action="append", default=[], metavar="PATTERN", help=what)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print a line; the exit code is 0. Raises CheckpointError for what cannot be read."""
    source: Path = args.src
    read = _reader(args.source)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist", cure="give a file or a folder", value=str(source))
    incoming = read(source)
    incoming = replace(incoming, tensors=[_as_buffer(tensor, args.buffer) for tensor in incoming.tensors])
    nbytes = sum(_nbytes(tensor) for tensor in incoming.tensors)
    with progress(f"importing {source}", nbytes) as told:
        commit = imported(incoming, args.dir, args.tag, f"{args.source}: {source}", told)
    kinds = ", ".join(sorted({tensor.kind for tensor in incoming.tensors}))
    print(f"{args.dir}/{commit.tag}: {len(incoming.tensors)} tensors ({kinds}), {size(nbytes)}")
    return 0


def _as_buffer(tensor: InTensor, patterns: Sequence[str]) -> InTensor:
    is_buffer = not tensor.dtype.is_floating or any(fnmatchcase(tensor.fqn, pattern) for pattern in patterns)
    return replace(tensor, kind=BUFFER) if tensor.kind == PARAM and is_buffer else tensor


def _reader(name: str) -> Callable[[Path], Incoming]:
    """The function that reads a format. Raises CheckpointError with the names there are."""
    if name == "safetensors":
        from polyaccel.exchange.formats import safetensors

        return lambda source: Incoming(safetensors.read(source))
    if name == "bin":
        from polyaccel.exchange.formats import torch_bin

        return lambda source: Incoming(torch_bin.read(source))
    if name == "dcp":
        from polyaccel.exchange.formats import torch_dcp

        return torch_dcp.read
    if name == "orbax":
        from polyaccel.exchange.formats import orbax

        return lambda source: Incoming(orbax.read(source))
    points = metadata.entry_points(group=GROUP)
    for point in points:
        if point.name == name:
            loaded: Callable[[Path], Incoming] = point.load()
            return loaded
    known = ", ".join(["safetensors", "bin", "dcp", "orbax", *sorted(point.name for point in points)])
    cure = "pip install polyaccel-deepspeed" if name == "deepspeed" else "install the package that reads it"
    raise CheckpointError(f"--from {name}: expected one of {known}", cure=cure, value=name)


def _nbytes(tensor: InTensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize
