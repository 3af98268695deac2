"""A gradient of which every rank has a slice, as user code sees it.

[Note: Gradient slice operations]
Elementwise operations that change the gradient in place (`mul_`, `clamp_`, `add_` of a tensor of the
parameter's shape, `zero_`) are done on the slice; done on all ranks they are done to the whole. Norms are sums
over all ranks, one small exchange for all parameters at once, so every rank must ask. That is all that
`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` need.

Every other operation that only reads (`sum`, `isfinite(p.grad).all()`, `p.grad[0]`, `buffer.add_(p.grad)`) gets the
whole gradient, exchanged for it, so every rank must ask for this too. What it returns is a copy. A view of that copy
cannot be written to (`GradientCopy`), for no update would see it. A change that is not elementwise is refused by name:
a slice would answer for itself, without notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from polyaccel.errors import ShardingError

_NORM = "aten::linalg_vector_norm"
_NORMS = "aten::_foreach_norm"
_ALIASES = frozenset({"aten::detach", "aten::alias"})
_ELEMENTWISE = frozenset({"aten::zero_", "aten::fill_", "aten::copy_", "aten::masked_fill_", "aten::_to_copy"})
"""Elementwise, without torch's tag for it."""


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

    def whole(self, part: LocalPart) -> Tensor:
        """All of what `part` is a slice of, a copy of the parameter's shape. Collective."""

    def on_sharded_write(self, fqn: str, *, is_zero: bool) -> None:
        """A sharded gradient was written to. `is_zero`: this rank's slice is zero now, or empty."""


class GradientCopy(Tensor):
    """A view of `whole`, a copy of a gradient, that only reads: what is written there would reach no update."""

    whole: Tensor
    fqn: str

    @staticmethod
    def __new__(cls, whole: Tensor, fqn: str) -> GradientCopy:
        made = Tensor._make_wrapper_subclass(
            cls, whole.shape, strides=whole.stride(), dtype=whole.dtype, device=whole.device
        )
        made.whole, made.fqn = whole, fqn
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _read(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole)

    def tolist(self) -> Any:
        return self.whole.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return _array_of(self.whole, force)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


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
        written = _written(func, args, kwargs)
        changed = [each for each in written if isinstance(each, ShardedGradient)]
        if not changed and (written or not _is_elementwise(func, args, kwargs)):
            return _read(func, args, kwargs)  # a buffer of the script's own is written to, or nothing
        if changed and name.startswith("aten::_foreach_"):
            _change_each(func, args, kwargs)
            return None
        if changed and not (_is_elementwise(func, args, kwargs) and args[0] is changed[0] and len(written) == 1):
            raise _refusal(func, args, kwargs)
        kwargs.pop("memory_format", None)  # a slice has one dimension
        one = changed[0] if changed else next(_sharded(args))
        result = func(*(_local(one, arg) for arg in args), **{key: _local(one, arg) for key, arg in kwargs.items()})
        if not changed:
            return cls(replace(one.part, values=result, is_result=True), one.gradients)
        one._note_write()
        return one

    def _note_write(self) -> None:
        if not self.part.is_result:
            self.gradients.on_sharded_write(self.part.fqn, is_zero=not bool(self.part.values.any()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part = self.part
        end = part.start + part.values.numel()
        return f"ShardedGradient({part.fqn!r}, shape={part.shape}, here elements {part.start} to {end}: {part.values})"

    def tolist(self) -> Any:
        return self.gradients.whole(self.part).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return _array_of(self.gradients.whole(self.part), force)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedGradient:
        part = replace(self.part, values=self.part.values.clone(), is_result=True)
        return type(self)(part, self.gradients)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused("pickle", self.part.fqn)


def _norm(
    func: Any, gradient: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if not isinstance(gradient, ShardedGradient) or gradient.part.is_result or dim is not None or not order > 0:
        read: Tensor = _read(
            torch.ops.aten.linalg_vector_norm.default, (gradient, order, dim, keepdim), {"dtype": dtype}
        )
        return read
    values = gradient.part.values
    return torch.tensor(
        gradient.gradients.norm(gradient.part.fqn, float(order)), dtype=dtype or values.dtype, device=values.device
    )


def _change_each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An elementwise operation in place on a list of gradients, whole ones among them."""
    changed = list(args[0])
    if not all(isinstance(one, ShardedGradient) for one in changed):
        raise _refusal(func, args, kwargs)
    lists = [
        [_local(one, each) for one, each in zip(changed, arg, strict=True)] if _is_tensors(arg) else arg for arg in args
    ]
    func(*lists, **kwargs)
    for one in changed:
        one._note_write()


def _is_elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operation on slices gives the slice of its result."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    if not (func._schema.name in _ELEMENTWISE or torch.Tag.pointwise in func.tags) or _needs_shape_only(func):
        return False
    if len(func._schema.returns) != 1 or any(map(_is_tensors, args)):
        return False
    shape = next((arg.shape for arg in tensors if isinstance(arg, ShardedGradient)), None)
    together = torch.broadcast_shapes(*(arg.shape for arg in tensors))  # type: ignore[no-untyped-call]
    return bool(shape == together)


def _needs_shape_only(func: Any) -> bool:
    """Whether it makes a new tensor and reads no values, such as `zeros_like` and `new_empty`."""
    name: str = func._schema.name
    return name.endswith("_like") or name.startswith("aten::new_")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operation writes to."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [each for each in found if isinstance(each, Tensor)]


def _read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation on whole gradients. Views of them come back as copies that cannot be written to. Collective."""
    if any(isinstance(each, GradientCopy) for each in _written(func, args, kwargs)):
        raise _refusal(func, args, kwargs)
    fqn = next(_fqns((*args, *kwargs.values())))

    def whole(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [whole(each) for each in arg]
        if isinstance(arg, ShardedGradient):
            if _needs_shape_only(func):
                return arg.part.values.new_empty(arg.part.shape)
            return arg.gradients.whole(arg.part)
        return arg.whole if isinstance(arg, GradientCopy) else arg

    result = func(*map(whole, args), **{key: whole(arg) for key, arg in kwargs.items()})
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    if not is_view:
        return result
    if isinstance(result, Tensor):
        return GradientCopy(result, fqn)
    return [GradientCopy(each, fqn) for each in result]


def _array_of(whole: Tensor, force: bool) -> Any:
    array = whole.numpy(force=force)
    array.flags.writeable = False  # what is written there would reach no update
    return array


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


def _fqns(args: Sequence[Any]) -> Iterator[str]:
    """The names of the parameters whose gradients are in the arguments."""
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _fqns(arg)
        elif isinstance(arg, ShardedGradient):
            yield arg.part.fqn
        elif isinstance(arg, GradientCopy):
            yield arg.fqn


def _refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardingError:
    return _refused(func._schema.name.removeprefix("aten::"), next(_fqns((*args, *kwargs.values()))))


def _refused(what: str, fqn: str) -> ShardingError:
    return ShardingError(
        f"{what} would change the gradient of {fqn!r}, of which each rank has a slice at this stage",
        hint="read it with polyaccel.utils.safe_get_full_grad and write it with safe_set_full_grad, on all ranks; "
        'elementwise changes of parameter.grad in place work, and "gradient_clipping" in the config clips',
        value=fqn,
    )
