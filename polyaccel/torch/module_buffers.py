"""A module's buffers (running statistics and the like): their element type, and one beginning on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn


def convert_buffers(module: nn.Module, dtype: torch.dtype, keep_in_fp32: Sequence[str] | Literal["auto"]) -> None:
    """Give the floating buffers of `module` the type `dtype`, in place.

    Those of modules that `keep_in_fp32` names, by any part of their full name, stay as they are; "auto" takes the names
    that a Hugging Face model states itself.
    """
    stated = getattr(module, "_keep_in_fp32_modules", None) or ()
    kept = set(stated if keep_in_fp32 == "auto" else keep_in_fp32)
    for name, part in module.named_modules():
        if kept.isdisjoint(name.split(".")):
            for key, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[key] = buffer.to(dtype)
