"""`deepspeed.utils.torch`: small questions about torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch's version lies between the two, themselves included.

    Raises ValueError where neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("min_version and max_version: neither is given\nhint: give one of them")
    here = torch.torch_version.TorchVersion(torch.__version__)
    return (min_version is None or here >= str(min_version)) and (max_version is None or here <= str(max_version))


def is_functorch_transforming() -> bool:
    """Whether the caller runs below torch.func.grad, vmap or another transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call `hook(param)` each time the gradient of `param` has been added up."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` compiled by torch."""
    return torch.compile(fn)
