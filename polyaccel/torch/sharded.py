"""What a parameter is to its user while it is sharded: everything but its values.

[Note: A parameter without values]
A sharded parameter keeps its shape, type and device; its storage is empty. Its class is `ShardedParameter` for that
time, so that an operation on it comes here first. Inside a forward or backward pass the parameter is gathered on
demand, which every rank does alike. Outside, one rank alone might ask, and a collective would hang; so it is an error
that names the cure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polyaccel.errors import ShardingError


class Demand(Protocol):
    def __call__(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Make `parameters` whole if that is safe now; False if it is not."""


_DEMAND = "_polyaccel_demand"
_NAME = "_polyaccel_fqn"
_CLASS = "_polyaccel_class"

NEEDS_NO_VALUES = frozenset(
    {
        *(
            getattr(Tensor, name)
            for name in (
                "dim", "ndimension", "size", "numel", "nelement", "stride", "element_size", "is_floating_point",
                "is_complex", "is_contiguous", "storage_offset", "get_device", "register_hook", "requires_grad_",
                "register_post_accumulate_grad_hook", "__hash__", "__len__", "is_inference", "is_signed",
            )
            if hasattr(Tensor, name)
        ),
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn", "is_cpu",
                "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_mps", "is_xpu",
                "itemsize", "names", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
            )
            if hasattr(Tensor, name)
        ),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)  # fmt: skip


class ShardedParameter(nn.Parameter):
    """The class of a parameter while it is sharded. See [Note: A parameter without values]."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in NEEDS_NO_VALUES:
            sharded = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is ShardedParameter]
            if sharded and not getattr(sharded[0], _DEMAND)(sharded):
                raise _not_here(sharded[0], func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype, device = tuple(self.shape), self.dtype, self.device
        return f"Parameter {getattr(self, _NAME)!r} (sharded, shape={shape}, dtype={dtype}, device={device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _not_here(self, "copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_here(self, "pickle")


def hide(parameter: nn.Parameter, fqn: str, demand: Demand) -> None:
    """Take the values of `parameter` away; operations on it ask `demand`."""
    if type(parameter) is not ShardedParameter:
        placeholder = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        placeholder.untyped_storage().resize_(0)
        parameter.data = placeholder
        setattr(parameter, _DEMAND, demand)
        setattr(parameter, _NAME, fqn)
        setattr(parameter, _CLASS, type(parameter))
        parameter.__class__ = ShardedParameter


def show(parameter: nn.Parameter, values: Tensor) -> None:
    """Give `parameter` its values: `values`, flat."""
    if type(parameter) is ShardedParameter:
        parameter.__class__ = getattr(parameter, _CLASS)
    parameter.data = values.view(parameter.shape)


def _not_here(parameter: nn.Parameter, what: Any) -> ShardingError:
    name = getattr(what, "__name__", str(what))
    fqn = getattr(parameter, _NAME)
    return ShardingError(
        f"{name} needs the values of parameter {fqn!r}, which is sharded over the ranks now",
        cure="read or change it inside `with polyaccel.zero.GatheredParameters([...])`, on all ranks",
        value=fqn,
    )
