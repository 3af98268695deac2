"""What `torch.save` wrote, read without running any of it, and torch's tensors on their way in."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from polyaccel.checkpoint.convert.importing import ImportTensor
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

TYPES = {dtype: getattr(torch, dtype.value) for dtype in DType}


def load_tree(file: Path) -> Any:
    """Load what `torch.save` wrote, mapped: tensors, plain containers, arguments of a command line."""
    try:
        with torch.serialization.safe_globals([Namespace]):
            try:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                return torch.load(file, map_location="cpu", weights_only=True)  # as torch before 1.6 wrote it
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}, which no tensor needs" if named else str(error).partition("\n")[0][:400]
        raise CheckpointError(
            f"{file} is refused: {why}",
            hint="save a state dict of tensors with torch.save",
            value=str(file),
        ) from error


def in_tensor(fqn: str, kind: str, tensor: torch.Tensor, origin: object) -> ImportTensor:
    """A tensor of torch on its way in. Raises CheckpointError, naming `origin`, for a type that polyaccel has not."""
    known = {theirs: ours for ours, theirs in TYPES.items()}
    if tensor.dtype not in known or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{fqn!r} in {origin} is a {tensor.layout} tensor of {tensor.dtype}, which polyaccel has not",
            hint=f"convert it to a dense one of {', '.join(dtype.value for dtype in known.values())}",
            value=str(tensor.dtype),
        )
    values = tensor.detach()

    def read(start: int, numel: int) -> bytes:
        flat = values.reshape(-1) if values.is_contiguous() else values.contiguous().reshape(-1)
        return flat[start : start + numel].view(torch.uint8).numpy().tobytes() if numel else b""

    return ImportTensor(fqn, kind, tuple(values.shape), known[values.dtype], read)
