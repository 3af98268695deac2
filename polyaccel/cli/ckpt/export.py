"""`polyaccel ckpt export`: a checkpoint as the files of another tool."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.convert.exporting import ExportTensor, Progress, chosen, default_kinds
from polyaccel.checkpoint.convert.locate import opened
from polyaccel.checkpoint.load.cooperative.blobs import OWNED_STATES
from polyaccel.cli.ckpt.shown import add_storage, progress
from polyaccel.cli.plan.command import parse_size
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, ShardingError
from polyaccel.utils.sizes import size

FORMATS = ("safetensors", "bin", "dcp", "orbax")
GROUP = "polyaccel.exporters"
"""Entry points of packages that write more formats: functions of (folder, reader, tensors, progress) that return the
names of what they wrote."""
Writer = Callable[[Path, CheckpointReader, Sequence[ExportTensor], Progress], list[str]]
_STATE_DICTS = ("safetensors", "bin")


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "write a checkpoint as Hugging Face safetensors, pytorch_model.bin, torch DCP or orbax"
    description = (
        f"{summary}. The first two take parameters and buffers, as model or pytorch_model in one file or in several "
        "with an index; the others take optimizer states too. Safetensors, bin, dcp and orbax are built in; packages "
        "bring others, for example polyaccel-deepspeed: deepspeed-universal."
    )
    parser = actions.add_parser("export", help=summary, description=description)
    parser.add_argument("dir", metavar="DIR", help="a directory of checkpoints, or the folder of a tag in it")
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder that is new or empty")
    formats = [*FORMATS, *sorted({point.name for point in metadata.entry_points(group=GROUP)})]
    shown = "(default: %(default)s)"
    parser.add_argument("--format", metavar=f"{{{','.join(formats)}}}", default=FORMATS[0], help=shown)
    parser.add_argument("--tag", help="the checkpoint (default: the one that `latest` names)")
    parser.add_argument("--dtype", help="float32, bf16, ...: of floating tensors (default: as they were saved)")
    kind = (
        "only tensors of this kind, for example exp_avg; may be given again (default: all; of a model, its state dict)"
    )
    parser.add_argument("--kind", action="append", help=kind)
    most = "of a file, for example 2GiB (default: %(default)s); a larger tensor has its own file"
    parser.add_argument("--max-shard-size", type=parse_size, default="5GiB", metavar="SIZE", help=most)
    add_storage(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the files and print their names; the exit code is 0. Raises CheckpointError where that cannot be done."""
    other = None if args.format in FORMATS else _writer(args.format)
    reader = opened(args.dir, args.tag, args.storage)
    tensors = _tensors(reader, args)
    out: Path = args.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not an empty folder", hint="name a new one", value=str(out))
    has_no_place = other is not None or args.format == "orbax"
    if has_no_place and args.kind is None and any(name.startswith(OWNED_STATES) for name in reader.owned_blobs()):
        from polyaccel.checkpoint.convert.formats.torch_files import require_no_kept_states

        require_no_kept_states(reader, args.format)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    with progress(f"exporting {reader.tag}", nbytes) as report:
        if args.format == "safetensors":
            from polyaccel.checkpoint.convert.formats import safetensors

            names = safetensors.write(out, tensors, args.max_shard_size, report)
        elif args.format == "bin":
            from polyaccel.checkpoint.convert.formats import torch_bin

            names = torch_bin.write(out, tensors, args.max_shard_size, report)
        elif args.format == "orbax":
            from polyaccel.checkpoint.convert.formats import orbax

            is_whole = args.kind is None and args.dtype is None
            names = orbax.write(out, tensors, report, reader if is_whole else None)
        elif other is None:
            from polyaccel.checkpoint.convert.formats import torch_dcp

            names = torch_dcp.write(out, reader, tensors, report)
        else:
            out.mkdir(parents=True, exist_ok=True)
            names = other(out, reader, tensors, report)
    print(f"{reader.tag}: {len(tensors)} tensors, {size(nbytes)}, in {out}: {', '.join(names)}")
    return 0


def _writer(name: str) -> Writer:
    """The function that writes a package's format. Raises CheckpointError with the names there are."""
    points = metadata.entry_points(group=GROUP)
    for point in points:
        if point.name == name:
            loaded: Writer = point.load()
            return loaded
    known = ", ".join([*FORMATS, *sorted(point.name for point in points)])
    drop_in = "pip install ./plugins/polyaccel-deepspeed"
    hint = drop_in if name.startswith("deepspeed") else "install the package that writes it"
    raise CheckpointError(f"--format {name}: expected one of {known}", hint=hint, value=name)


def _tensors(reader: CheckpointReader, args: argparse.Namespace) -> tuple[ExportTensor, ...]:
    try:
        dtype = None if args.dtype is None else DType.parse(args.dtype)
    except ShardingError as error:
        raise CheckpointError(f"--dtype {args.dtype}: {error.message}", hint=error.hint, value=args.dtype) from error
    if dtype is not None and not dtype.is_floating:
        raise CheckpointError(f"--dtype {args.dtype} is not a floating type", hint="give bf16", value=args.dtype)
    if args.format in _STATE_DICTS:
        return chosen(reader, args.kind or default_kinds(), dtype)
    kinds = args.kind or sorted({tensor.kind for tensor in reader.tensors()})
    return tuple(tensor for kind in kinds for tensor in chosen(reader, [kind], dtype))
