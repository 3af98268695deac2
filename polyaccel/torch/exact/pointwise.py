"""Elementwise operations whose result for a number does not depend on where it lies.

[Note: Tails of elementwise operations]
torch's loops on the host compute whole vectors of numbers, and the last ones alone. Functions such as SiLU, GELU and
the exponential are other approximations there, and 16-bit numbers round elsewhere. So tensors are laid out contiguously
and padded: the part of every thread then consists of whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_BLOCK = 64
"""Elements of two vectors of 16-bit numbers, the step of torch's longest loop."""
_GRAIN = 32768
"""Elements from which torch shares a loop out among threads."""


def padded_numel(numel: int, threads: int) -> int:
    """Return how many elements torch cuts into whole blocks for up to `threads` threads, at least `numel`."""
    parts = min(threads, -(-numel // _GRAIN)) or 1
    while True:
        padded = -(-numel // (_BLOCK * parts)) * _BLOCK * parts
        if (found := min(threads, -(-padded // _GRAIN)) or 1) == parts:
            return padded
        parts = found


def apply_padded(function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Apply an elementwise function, in place where it is one. See [Note: Tails of elementwise operations]."""
    tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        return function(*args, **named)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    numel = shape.numel()
    padded = padded_numel(numel, torch.get_num_threads())
    if padded == numel and all(tensor.shape == shape and tensor.is_contiguous() for tensor in tensors):
        return function(*args, **named)

    def laid_out(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        flat = value.new_ones(padded)  # a number that no function refuses
        flat[:numel].view(shape).copy_(value.expand(shape))
        return flat

    found = function(*(laid_out(value) for value in args), **{name: laid_out(named[name]) for name in named})
    result = found[:numel].view(shape)
    if is_in_place(function):
        args[0].copy_(result)
        return args[0]
    return result


def is_in_place(function: Any) -> bool:
    """Whether an operation of aten writes to its first argument."""
    schema = function._schema  # torch 2.8 has no tag that says so
    first = schema.arguments[0].alias_info if schema.arguments else None
    return first is not None and first.is_write and not any(each.is_out for each in schema.arguments)
