"""`pytorch_model.bin`: a state dict as `torch.save` writes it. Reading allows tensors and plain containers alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from polyaccel.checkpoint.storage import FileStorage
from polyaccel.checkpoint.tensors import PARAM
from polyaccel.errors import CheckpointError
from polyaccel.exchange.exporting import OutTensor, Progress, file_names, in_files, index_of, mapped
from polyaccel.exchange.formats.safetensors import files_of
from polyaccel.exchange.importing import InTensor
from polyaccel.types import DType

STEM, SUFFIX = "pytorch_model", ".bin"
_TYPES = {dtype: getattr(torch, dtype.value) for dtype in DType}


def write(out: Path, tensors: Sequence[OutTensor], most_nbytes: int, progress: Progress) -> list[str]:
    """Write `pytorch_model.bin`, or several files and their index. Returns their names.

    `torch.save` wants all tensors of a file at once: they stand in a file beside it meanwhile, mapped into memory, so
    that the system may drop what it needs the room for. Raises CheckpointError for damage.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = in_files(tensors, most_nbytes)
    names = file_names(STEM, SUFFIX, len(files))
    for name, members in zip(names, files, strict=True):
        with on_disk(out, members, progress) as found:
            torch.save({tensor.name: found[tensor] for tensor in members}, out / f".{name}.tmp")
        os.replace(out / f".{name}.tmp", out / name)
    if len(files) > 1:
        names.append(f"{STEM}{SUFFIX}.index.json")
        FileStorage(out).write(names[-1], [json.dumps(index_of(files, names[:-1]), indent=2).encode()])
    return names


@contextmanager
def on_disk(folder: Path, tensors: Sequence[OutTensor], progress: Progress) -> Iterator[dict[OutTensor, torch.Tensor]]:
    """The tensors as torch's, over a file in `folder` that is gone when the block is left."""
    with mapped(folder, tensors, progress) as found:
        yield {
            tensor: torch.from_numpy(data).view(_TYPES[tensor.dtype]).reshape(tensor.shape)
            for tensor, data in zip(tensors, found, strict=True)
        }


def read(source: Path) -> list[InTensor]:
    """The tensors of a file, or of all files of a directory, mapped and not read; of tied ones the first.

    Raises CheckpointError for a file that holds anything but tensors by name, naming what torch refused to make.
    """
    found: list[InTensor] = []
    seen: dict[tuple[Any, ...], str] = {}
    for file in files_of(source, STEM, SUFFIX):
        for name, tensor in load(file).items():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if tensor.numel() and seen.setdefault(place, name) != name:
                continue
            found.append(in_tensor(name, PARAM, tensor, file))
    return found


def load(file: Path) -> Mapping[str, torch.Tensor]:
    """The state dict in a file, alone or as its `state_dict`, mapped into memory."""
    try:
        tree = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}, which no tensor needs" if named else str(error).partition("\n")[0][:400]
        raise CheckpointError(
            f"{file} is refused: {why}",
            cure="save a state dict of tensors with torch.save",
            value=str(file),
        ) from error
    tree = tree.get("state_dict", tree) if isinstance(tree, Mapping) else tree
    others = [key for key, value in tree.items() if not torch.is_tensor(value)] if isinstance(tree, Mapping) else [tree]
    if others:
        raise CheckpointError(
            f"{file} holds more than tensors by name: {str(others[0])[:100]!r}",
            cure="save a state dict of tensors with torch.save",
            value=str(file),
        )
    tensors: Mapping[str, torch.Tensor] = tree
    return tensors


def in_tensor(fqn: str, kind: str, tensor: torch.Tensor, origin: object) -> InTensor:
    """A tensor of torch on its way in. Raises CheckpointError, naming `origin`, for a type that polyaccel has not."""
    known = {theirs: ours for ours, theirs in _TYPES.items()}
    if tensor.dtype not in known or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{fqn!r} in {origin} is a {tensor.layout} tensor of {tensor.dtype}, which polyaccel has not",
            cure=f"convert it to a dense one of {', '.join(dtype.value for dtype in known.values())}",
            value=str(tensor.dtype),
        )
    values = tensor.detach()

    def read(start: int, numel: int) -> bytes:
        flat = values.reshape(-1) if values.is_contiguous() else values.contiguous().reshape(-1)
        return flat[start : start + numel].view(torch.uint8).numpy().tobytes() if numel else b""

    return InTensor(fqn, kind, tuple(values.shape), known[values.dtype], read)
