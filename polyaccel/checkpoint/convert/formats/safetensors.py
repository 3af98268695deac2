"""Safetensors files in the layout of the Hugging Face hub, written and read in the memory of 16 MiB."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyaccel.checkpoint.convert.exporting import ExportTensor, Progress, file_names, in_files, index_of
from polyaccel.checkpoint.convert.formats.model_files import find_files, with_states
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming
from polyaccel.checkpoint.format.pieces import SAFETENSORS_TYPES
from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.errors import CheckpointError

STEM, SUFFIX = "model", ".safetensors"
_MOST_HEADER_NBYTES = 100_000_000
"""By the format."""


def write(out: Path, tensors: Sequence[ExportTensor], most_nbytes: int, progress: Progress) -> list[str]:
    """Write one file, or several and their index, each whole or not at all; return their names."""
    storage = FileStorage(out)
    files = in_files(tensors, most_nbytes)
    names = file_names(STEM, SUFFIX, len(files))
    for name, members in zip(names, files, strict=True):
        storage.write(name, _contents(members, progress))
    if len(files) > 1:
        names.append(f"{STEM}{SUFFIX}.index.json")
        storage.write(names[-1], [json.dumps(index_of(files, names[:-1]), indent=2).encode()])
    return names


def read(source: Path) -> Incoming:
    """Read tensors of a file or a folder's model, with a trainer's optimizer and schedule."""
    files = find_files(source, SUFFIX)
    found = {file: [*_tensors(file)] for file in files.files}
    files.check({file: [tensor.fqn for tensor in tensors] for file, tensors in found.items()})
    return with_states(Incoming([tensor for tensors in found.values() for tensor in tensors]), files)


def _contents(tensors: Sequence[ExportTensor], progress: Progress) -> Iterator[bytes]:
    # The larger types come first, so that each tensor is aligned to its own.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        end = at + tensor.nbytes
        header[tensor.name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in ordered:
        yield from tensor.chunks(progress)


def _tensors(file: Path) -> Iterator[ImportTensor]:
    nbytes = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if nbytes < 8 or length > min(_MOST_HEADER_NBYTES, nbytes - 8):
            raise _unreadable(file, f"its header of {length} bytes does not fit its {nbytes}")
        head = opened.read(length)
    try:
        header = json.loads(head)
        header.pop("__metadata__", None)
        entries = [
            (str(name), each["dtype"], tuple(map(int, each["shape"])), *map(int, each["data_offsets"]))
            for name, each in header.items()
        ]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _unreadable(file, repr(error)) from error
    known = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
    for name, kind, shape, start, end in entries:
        if kind not in known:
            raise CheckpointError(
                f"{name!r} in {file} is of the type {kind}, which polyaccel has not",
                hint=f"convert it to one of {', '.join(known)}",
                value=kind,
            )
        dtype = known[kind]
        if min(shape, default=0) < 0 or not 0 <= start <= end <= nbytes - 8 - length:
            raise _unreadable(file, f"{name!r} lies outside of it")
        if end - start != math.prod(shape) * dtype.itemsize:
            raise _unreadable(file, f"{name!r} has {end - start} bytes, its shape is {list(shape)}")
        yield ImportTensor.in_file(name, shape, dtype, file, 8 + length + start)


def _unreadable(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a safetensors file: {why[:300]}", hint="fetch it again", value=str(file))
