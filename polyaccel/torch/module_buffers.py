"""A module's buffers, running statistics and the like: their element type."""

from __future__ import annotations

from torch import nn

from polyaccel.accelerators.torch_memory import torch_dtype
from polyaccel.config.precision import DataTypesConfig
from polyaccel.types import DType


def convert_buffers(module: nn.Module, data_types: DataTypesConfig) -> None:
    """Give the floating buffers of `module` the type `data_types.buffer_dtype`, in place; None leaves them as they are.

    Those of modules that `keep_in_fp32_modules` names, by any part of their full name, stay as they are; "auto" takes
    the names that a Hugging Face model states itself.
    """
    if data_types.buffer_dtype is None:
        return
    dtype = torch_dtype(DType.parse(data_types.buffer_dtype))
    stated = getattr(module, "_keep_in_fp32_modules", None) or ()
    kept = set(stated if data_types.keep_in_fp32_modules == "auto" else data_types.keep_in_fp32_modules)
    for name, part in module.named_modules():
        if kept.isdisjoint(name.split(".")):
            for key, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[key] = buffer.to(dtype)
