"""Buffers of another type than the parameters next to them: the error where torch refuses to compute with both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch import nn

from polyaccel.errors import PolyaccelError


@contextmanager
def explaining_buffer_types(model: nn.Module) -> Iterator[None]:
    """Raise PolyaccelError in place of torch's refusal of two types in a module of `model` that has 16-bit parameters
    next to it and buffers of another type. The error names the buffers; its value is the first name."""
    try:
        yield
    except RuntimeError as error:
        dtypes = (each.dtype for each in model.parameters())
        dtype = next((each for each in dtypes if each in _SHORT), None)
        if "type" not in str(error) or dtype is None or not (names := _odd_buffers(model, error, dtype)):
            raise
        said = str(error).strip().partition("\n")[0]
        raise PolyaccelError(
            f"the buffers {', '.join(names)} are not {dtype}, as the parameters are, and torch refuses to compute with "
            f"both types: {said}",
            hint=f'set "data_types": {{"buffer_dtype": "{_SHORT[dtype]}"}}, or convert in forward: x.to(buffer.dtype)',
            value=names[0],
        ) from error


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _odd_buffers(model: nn.Module, error: RuntimeError, dtype: torch.dtype) -> list[str]:
    """The names of floating buffers that are not of `dtype`, of the innermost module that was computing."""
    running = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    innermost = next((one for one in reversed(running) if isinstance(one, nn.Module)), None)
    prefix = next((f"{name}." if name else "" for name, module in model.named_modules() if module is innermost), None)
    if innermost is None or prefix is None:
        return []
    buffers = innermost.named_buffers(recurse=False)
    return [f"{prefix}{name}" for name, one in buffers if one.is_floating_point() and one.dtype != dtype]
