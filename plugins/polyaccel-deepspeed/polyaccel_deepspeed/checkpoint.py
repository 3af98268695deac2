"""`deepspeed.utils.zero_to_fp32` over polyaccel's checkpoints: whole weights in float32, offline, on one process."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.checkpoint import CheckpointReader, open_checkpoint
from polyaccel.checkpoint.convert.exporting import chosen, default_kinds
from polyaccel.checkpoint.convert.formats import safetensors, torch_bin
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, ShardingError
from polyaccel.torch.checkpoint.load import client_state_of


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The whole state dict of a checkpoint, parameters in full precision. `lazy_mode` has no effect.

    A parameter that is tied to another one is there under each of its names, as one tensor.
    """
    reader = open_checkpoint(checkpoint_dir, tag)
    host = CpuAccelerator()
    left_out = _frozen(reader) if exclude_frozen_parameters else frozenset()
    found = {
        entry.fqn: _whole(reader, host, entry.fqn, entry.kind, entry.shape)
        for entry in reader.tensors()
        if entry.kind in (PARAM, BUFFER) and entry.fqn not in left_out
    }
    return found | {name: found[first] for name, first in _tied(reader).items() if first in found}


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load a checkpoint's weights into a module on the host, and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in float32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's whole weights, as `dtype`, into the folder `output_dir`: one file, or several of at most
    `max_shard_size` and their index. Files of torch hold a tied weight under each name. An `output_dir` that ends in
    `.bin`, `.pt`, `.ckpt` or `.safetensors` is one file.

    Raises CheckpointError for damage, and for a type or a size that cannot be.
    """
    as_type, most_nbytes = _output_dtype(dtype), _nbytes(max_shard_size)
    reader = open_checkpoint(checkpoint_dir, tag)
    left_out = _frozen(reader) if exclude_frozen_parameters else frozenset()
    others: dict[str, list[str]] = {}
    for name, first in _tied(reader).items():
        others.setdefault(first, []).append(name)
    tensors = [
        replace(tensor, other_names=tuple(others.get(tensor.name, ())))
        for tensor in chosen(reader, default_kinds(), as_type)
        if tensor.name not in left_out
    ]
    target = Path(output_dir)
    if target.suffix not in _FILES:
        (safetensors if safe_serialization else torch_bin).write(target, tensors, most_nbytes, _no_progress)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".zero_to_fp32-", dir=target.parent) as folder:
        writer = safetensors if target.suffix == ".safetensors" else torch_bin
        (name,) = writer.write(Path(folder), tensors, sys.maxsize, _no_progress)
        Path(folder, name).replace(target)


_FILES = (".bin", ".pt", ".ckpt", ".safetensors")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _no_progress(nbytes: int) -> None:
    pass


def _output_dtype(dtype: torch.dtype | str) -> DType:
    """Float32, float16 or bfloat16, by any of their names."""
    found = None
    with suppress(ShardingError):
        found = DType.parse(str(dtype).lower().removeprefix("torch."))
    if found not in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        raise CheckpointError(f"weights as {dtype!r}", hint="give float32, float16 or bfloat16", value=dtype)
    return found


def _nbytes(size: int | str | None) -> int:
    """The most bytes of a file, by powers of 1000 as on the Hugging Face hub; None is not a limit."""
    if size is None:
        return sys.maxsize
    found = re.fullmatch(r"(\d+)\s*([KMGT]B)?", str(size).strip().upper())
    if found is None or int(found[1]) < 1:
        raise CheckpointError(f"max_shard_size={size!r}", hint="give a size like 5GB", value=size)
    return int(found[1]) * _UNITS[found[2] or ""]


def _tied(reader: CheckpointReader) -> dict[str, str]:
    """The other names of tied parameters, each with the name that the parameter is saved under."""
    return dict(reader.scalars.get("tied_weights") or {})


def _frozen(reader: CheckpointReader) -> frozenset[str]:
    """The parameters that were not trained. Raises CheckpointError for a checkpoint of weights alone."""
    trained = reader.scalars.get("param_steps") or {}
    if not trained:
        raise CheckpointError(
            f"exclude_frozen_parameters: {reader.tag!r} does not list the parameters that were trained",
            hint="leave the option out",
            value=reader.tag,
        )
    return frozenset(entry.fqn for entry in reader.tensors() if entry.kind == PARAM and entry.fqn not in trained)


# Lightning's conversion opens DeepSpeed's files itself, for the stage and what its callbacks saved. polyaccel has
# neither file, so each is written when it is asked for, and lives as long as the process.


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """One file, for all ranks, with no optimizer state in it: only DeepSpeed's place of the stage, of which a
    checkpoint of polyaccel's has none. `checkpoint_dir` is the folder of the tag. Of a folder of DeepSpeed's, its
    files in the order of their ranks."""
    if written := [str(file) for file in Path(checkpoint_dir).glob("*_optim_states.pt")]:
        return sorted(written, key=lambda file: [int(part) for part in re.findall(r"\d+", Path(file).name)])
    open_checkpoint(str(Path(checkpoint_dir).parent), Path(checkpoint_dir).name)
    return [_written(checkpoint_dir, "optim_states.pt", {"optimizer_state_dict": {"zero_stage": 0}})]


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """A file with the checkpoint's client state, which `torch.load` reads. `checkpoint_dir` is the folder of the tag,
    and `zero_stage` has no effect."""
    reader = open_checkpoint(str(Path(checkpoint_dir).parent), Path(checkpoint_dir).name)
    return _written(checkpoint_dir, "model_states.pt", client_state_of(reader))


@cache
def _files() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="polyaccel-")


def _written(checkpoint_dir: str, name: str, content: dict[str, Any]) -> str:
    folder = Path(_files().name, Path(checkpoint_dir).resolve().relative_to("/"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / name)
    return str(folder / name)


def _whole(reader: CheckpointReader, host: CpuAccelerator, fqn: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    saved = reader.tensor(fqn, kind).dtype
    dtype = DType.FLOAT32 if kind == PARAM and saved in (DType.FLOAT16, DType.BFLOAT16) else saved
    numel = 1
    for size in shape:
        numel *= size
    flat = host.allocate(numel, dtype)
    reader.read_into(fqn, kind, 0, numel, flat, cast_through=host.allocate)
    whole: Any = flat.raw
    return torch.as_tensor(whole).view(shape)
