"""`deepspeed.utils.zero_to_fp32` over polyaccel's checkpoints: whole weights in float32, offline, on one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.checkpoint import CheckpointReader, open_checkpoint
from polyaccel.checkpoint.tensors import PARAM
from polyaccel.errors import CheckpointError
from polyaccel.torch.states.checkpoint import client_state_of
from polyaccel.types import DType

_BUFFER = "buffer"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The whole state dict of a checkpoint, parameters in full precision. `lazy_mode` has no effect.

    A parameter that is tied to another one is there under its first name only.
    """
    if exclude_frozen_parameters:
        raise CheckpointError(
            "a checkpoint does not say which of its parameters were frozen",
            cure="save with exclude_frozen_parameters=True, and leave it out here",
        )
    reader = open_checkpoint(checkpoint_dir, tag)
    host = CpuAccelerator()
    return {
        entry.fqn: _whole(reader, host, entry.fqn, entry.kind, entry.shape)
        for entry in reader.tensors()
        if entry.kind in (PARAM, _BUFFER)
    }


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load a checkpoint's weights into a module on the host, and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str = "5GB",
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
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's whole weights, as `dtype`, to one file in `output_dir`, or to `output_dir` itself if it ends
    in `.bin`, `.pt`, `.ckpt` or `.safetensors`. `max_shard_size` has no effect."""
    target = Path(output_dir)
    if target.suffix not in (".bin", ".pt", ".ckpt", ".safetensors"):
        target /= "model.safetensors" if safe_serialization else "pytorch_model.bin"
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in whole.items()}
    if target.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, target)
    else:
        torch.save(state, target)


# Lightning's conversion opens DeepSpeed's files itself, for the stage and what its callbacks saved. polyaccel has
# neither file, so each is written when it is asked for, and lives as long as the process.


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """One file, for all ranks, with no optimizer state in it: only DeepSpeed's place of the stage, of which a
    checkpoint of polyaccel's has none. `checkpoint_dir` is the folder of the tag."""
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
