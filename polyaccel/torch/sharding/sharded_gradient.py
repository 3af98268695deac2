"""A gradient of which every rank has a slice, as user code sees it.

[Note: Gradient slice operations]
Elementwise operations that change the gradient in place (`mul_`, `clamp_`, `add_` of a tensor of the
parameter's shape, `zero_`) are done on the slice; done on all ranks they are done to the whole. Norms are sums
over all ranks, one small exchange for all parameters at once, so every rank must ask. That is all that
`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` need. Anything else is refused by name: a slice would answer for
itself, without notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from polyaccel.errors import ShardingError

_NORM = "aten::linalg_vector_norm"
_NORMS = "aten::_foreach_norm"
_ALIASES = frozenset({"aten::detach", "aten::alias"})
_ELEMENTWISE = frozenset({"aten::zero_", "aten::fill_", "aten::copy_", "aten::masked_fill_"})
"""In place and elementwise, without torch's tag for it."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Elements [start, start + values.numel()) of the flattened gradient of parameter `fqn`, of shape `shape`.

    `is_result`: `values` are the result of an operation on a gradient, and no update reads them.
    """

    fqn: str
    start: int
    values: Tensor
    shape: tuple[int, ...]
    is_result: bool = False

    def cut(self, whole: Tensor) -> Tensor:
        """The same elements of a tensor that broadcasts to the parameter's shape."""
        return whole.expand(self.shape).reshape(-1)[self.start : self.start + self.values.numel()]

    def require_of(self, fqn: str) -> None:
        """Raise ShardingError unless this is of parameter `fqn`: slices of two parameters lie at different places."""
        if fqn != self.fqn:
            raise ShardingError(
                f"sharded gradients of {self.fqn!r} and {fqn!r} were combined, which are cut differently",
                hint="read whole ones with polyaccel.utils.safe_get_full_grad",
                value=(self.fqn, fqn),
            )


class Gradients(Protocol):
    """The owner of sharded gradients.

    A protocol, because `GradientAccess` makes sharded gradients: the class itself would close a cycle of imports.
    """

    def norm(self, fqn: str, order: float) -> float:
        """The norm of a gradient over all ranks. Collective."""

    def on_sharded_write(self, fqn: str, *, is_zero: bool) -> None:
        """A sharded gradient was written to. `is_zero`: this rank's slice is zero now, or empty."""


class ShardedGradient(Tensor):
    """`part` of a gradient, with the type, shape and device of the whole. See [Note: Gradient slice operations]."""

    part: LocalPart
    gradients: Gradients

    @staticmethod
    def __new__(cls, part: LocalPart, gradients: Gradients) -> ShardedGradient:
        made = Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.values.dtype, device=part.values.device)
        made.part, made.gradients = part, gradients
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name, dict(kwargs or {})
        if name == _NORM:
            return _norm(func, *args, **kwargs)
        if name == _NORMS:
            return [_norm(func, each, *args[1:], **kwargs) for each in args[0]]
        if name in _ALIASES:
            return cls(args[0].part, args[0].gradients)
        is_change = name.endswith("_")
        if name.startswith("aten::_foreach_") and is_change:
            _change_each(func, args, kwargs)
            return None
        is_elementwise = name in _ELEMENTWISE or torch.Tag.pointwise in func.tags
        first = args[0] if args else None
        if not is_elementwise or (is_change and not isinstance(first, ShardedGradient)):
            raise _refusal(func, args)
        one = first if isinstance(first, ShardedGradient) else next(_sharded(args))
        result = func(*(_local(one, arg) for arg in args), **{key: _local(one, arg) for key, arg in kwargs.items()})
        if not is_change:
            return cls(replace(one.part, values=result, is_result=True), one.gradients)
        one._note_write()
        return first

    def _note_write(self) -> None:
        if not self.part.is_result:
            self.gradients.on_sharded_write(self.part.fqn, is_zero=not bool(self.part.values.any()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part = self.part
        end = part.start + part.values.numel()
        return f"ShardedGradient({part.fqn!r}, shape={part.shape}, here elements {part.start} to {end}: {part.values})"

    def tolist(self) -> Any:
        raise _refused("tolist", self.part.fqn)

    def numpy(self, *, force: bool = False) -> Any:
        raise _refused("numpy", self.part.fqn)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedGradient:
        part = replace(self.part, values=self.part.values.clone(), is_result=True)
        return type(self)(part, self.gradients)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused("pickle", self.part.fqn)


def _norm(
    func: Any, gradient: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if not isinstance(gradient, ShardedGradient) or gradient.part.is_result or dim is not None or not order > 0:
        raise _refusal(func, (gradient,))
    values = gradient.part.values
    return torch.tensor(
        gradient.gradients.norm(gradient.part.fqn, float(order)), dtype=dtype or values.dtype, device=values.device
    )


def _change_each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An elementwise operation in place on a list of gradients, whole ones among them."""
    changed = list(args[0])
    if not all(isinstance(one, ShardedGradient) for one in changed):
        raise _refusal(func, args)
    lists = [
        [_local(one, each) for one, each in zip(changed, arg, strict=True)] if _is_tensors(arg) else arg for arg in args
    ]
    func(*lists, **kwargs)
    for one in changed:
        one._note_write()


def _is_tensors(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], Tensor)


def _local(one: ShardedGradient, arg: Any) -> Any:
    """An argument of an elementwise operation on `one`, for its slice."""
    if isinstance(arg, ShardedGradient):
        arg.part.require_of(one.part.fqn)
        return arg.part.values
    return one.part.cut(arg) if isinstance(arg, Tensor) and arg.dim() else arg


def _sharded(args: Sequence[Any]) -> Any:
    for arg in args:
        yield from (
            each for each in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(each, ShardedGradient)
        )


def _refusal(func: Any, args: Sequence[Any]) -> ShardingError:
    return _refused(func._schema.name.removeprefix("aten::"), next(_sharded(args)).part.fqn)


def _refused(what: str, fqn: str) -> ShardingError:
    return ShardingError(
        f"{what} needs the whole gradient of {fqn!r}, of which each rank has a slice at this stage",
        hint="read it with polyaccel.utils.safe_get_full_grad and write it with safe_set_full_grad, on all ranks; "
        'norms and elementwise changes in place work, and "gradient_clipping" in the config clips',
        value=fqn,
    )
