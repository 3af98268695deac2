"""What a layer gives, taken apart into tensors and a structure of plain values, and put together on the next stage.

[Note: Structure encoding]
A structure is the JSON of a tree in which tensors are numbers of their places, so reading one runs no code of its
sender. A tree may name a class: a named tuple, a dataclass (like transformers' outputs), an enum, one of torch's own
tuples. It is looked up among the modules that are imported, and its fields are set: no constructor runs. A tensor that
stands in several places is one tensor on the next stage too, so its gradients add up as in one stage.

[Note: In-place layers]
What a stage receives is a leaf of autograd's graph, which no layer may change in place. A layer gets an alias of it
instead, which shares its memory and has a graph behind it. Between chunks of one stage the chunk before may still need
its output for its backward pass; a change of the alias then counts as a change of that output, so that autograd
refuses exactly what it refuses without a cut.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import dtype_of
from polyaccel.core import tagged_json
from polyaccel.errors import PolyaccelError

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_TUPLES_OF_TORCH = "torch.return_types"
Node = list[Any]


class UnsendableValue(PolyaccelError, ValueError):
    """A value that no stage can send to another; `value` is its type."""


class StageValue(NamedTuple):
    """What a layer gives. See [Note: Structure encoding]."""

    structure: bytes
    tensors: list[Tensor]


def take_apart(value: Any, device: torch.device) -> StageValue:
    """The tensors of `value`, all of them on `device`, and its structure. Raises UnsendableValue."""
    if isinstance(value, Tensor) and _is_on(value, device) and _is_plain_tensor(value):
        return StageValue(_ONE_TENSOR, [_behind_graph(value)])  # what nearly every layer gives
    taker = _Taker(device)
    try:
        tree = taker.node(value)
        return StageValue(tagged_json.to_bytes(tree, "value"), taker.tensors)
    except (RecursionError, tagged_json.SerializationError) as error:
        raise UnsendableValue(
            f"a {_name(type(value))} that is nested too deep, or contains itself", value=type(value)
        ) from error


def unflatten(value: StageValue) -> Any:
    """The value whose parts these are. Raises UnsendableValue for a class that this process has not imported."""
    if value.structure == _ONE_TENSOR:
        return value.tensors[0]
    return _put(_tree(value.structure), value.tensors)


def leaves_of(value: StageValue, *, needs_grad: bool) -> StageValue:
    """`value` without the graph behind it, as a stage receives it."""
    return StageValue(
        value.structure,
        [tensor.detach().requires_grad_(tensor.requires_grad and needs_grad) for tensor in value.tensors],
    )


def aliases_of(value: StageValue) -> StageValue:
    """`value` as a layer may get it. See [Note: In-place layers]."""
    tensors = [_Alias.apply(tensor) if tensor.requires_grad else tensor for tensor in value.tensors]  # type: ignore[no-untyped-call]
    return StageValue(value.structure, tensors)


def count_changes(aliases: StageValue, outputs: StageValue) -> None:
    """Let changes of `aliases` in place be changes of the `outputs` of the chunk before, whose memory they share."""
    for alias, output in zip(aliases.tensors, outputs.tensors, strict=True):
        if alias.requires_grad and alias._version:
            torch.autograd.graph.increment_version(output)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def copy_of(value: Any, *, clones: bool) -> Any:
    """`value` in new containers, and with `clones` its tensors copied; as it is where it cannot be taken apart."""
    if isinstance(value, Tensor) and not clones:
        return value
    try:
        device = next((tensor.device for tensor in tensors_in(value)), torch.device("cpu"))
        structure, tensors = take_apart(value, device)
    except UnsendableValue:
        return value
    return unflatten(StageValue(structure, [tensor.clone() for tensor in tensors] if clones else tensors))


class _Alias(torch.autograd.Function):
    """The same memory with a graph behind it. `data` is not a view, so that a change in place is allowed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Taker:
    """Takes one value apart."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        self._device = device
        self._known: dict[int, Node] = {}
        self._kept: list[Tensor] = []  # so that no identity is used twice

    def node(self, value: Any) -> Node:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind in _PLAIN:
            return ["plain", value]
        if kind in (list, tuple, torch.Size):
            return [kind.__name__, *map(self.node, value)]
        if kind in (dict, OrderedDict):
            return [kind.__name__, *([self.node(key), self.node(one)] for key, one in value.items())]
        if isinstance(value, Enum):
            return ["enum", *self._class(kind), self.node(value.value)]
        if isinstance(value, tuple) and (hasattr(kind, "_make") or kind.__module__ == _TUPLES_OF_TORCH):
            return ["named", *self._class(kind), *map(self.node, value)]
        if is_dataclass(kind) and (not isinstance(value, dict) or isinstance(value, OrderedDict)):
            return self._instance(value)
        make = _WORDS.get(kind)
        if make is not None:
            return [kind.__name__, *make(value)]
        raise UnsendableValue(f"a {_name(kind)}", value=kind)

    def _tensor(self, tensor: Tensor) -> Node:
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        self._kept.append(tensor)
        sent, marks = tensor, []
        if sent.is_complex() and sent.layout is torch.strided:
            sent = torch.view_as_real(sent.resolve_conj().resolve_neg())
            marks.append("complex")
        if not _is_on(sent, self._device) and not sent.is_meta:
            marks.append(sent.device.type)
            sent = sent.to(self._device)
        if not _is_plain_tensor(sent):
            raise UnsendableValue(
                f"a {_name(type(sent))} of {str(sent.dtype).removeprefix('torch.')}, {_layout(sent)}", value=sent.dtype
            )
        self.tensors.append(_behind_graph(sent))
        found = self._known[id(tensor)] = ["tensor", len(self.tensors) - 1, *marks]
        return found

    def _instance(self, value: Any) -> Node:
        kind = type(value)
        own = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for field in fields(kind):
            if field.name not in own and hasattr(value, field.name):
                own[field.name] = getattr(value, field.name)
        items = [[self.node(key), self.node(one)] for key, one in value.items()] if isinstance(value, dict) else None
        return ["object", *self._class(kind), items, *([name, self.node(one)] for name, one in own.items())]

    def _class(self, kind: type) -> tuple[str, str]:
        if _found(kind.__module__, kind.__qualname__) is not kind:
            raise UnsendableValue(f"a {_name(kind)}, a class that no module has by this name", value=kind)
        return kind.__module__, kind.__qualname__


_WORDS: dict[type, Callable[[Any], list[Any]]] = {
    torch.dtype: lambda value: [str(value).removeprefix("torch.")],
    torch.device: lambda value: [str(value)],
    complex: lambda value: [value.real, value.imag],
    range: lambda value: [value.start, value.stop, value.step],
}
_READ: dict[str, Callable[..., Any]] = {
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "complex": complex,
    "range": range,
}


def _put(node: Node, tensors: Sequence[Tensor]) -> Any:
    kind, *rest = node
    if kind == "tensor":
        tensor, marks = tensors[rest[0]], rest[1:]
        for mark in reversed(marks):
            tensor = torch.view_as_complex(tensor) if mark == "complex" else tensor.to(mark)
        return tensor
    if kind == "plain":
        return rest[0]
    if kind in ("list", "tuple", "Size"):
        items = [_put(one, tensors) for one in rest]
        return items if kind == "list" else tuple(items) if kind == "tuple" else torch.Size(items)
    if kind in ("dict", "OrderedDict"):
        pairs = ((_put(key, tensors), _put(one, tensors)) for key, one in rest)
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind in ("enum", "named", "object"):
        return _put_instance(kind, _required(*rest[:2]), rest[2:], tensors)
    return _READ[kind](*rest)


def _put_instance(kind: str, own: Any, rest: list[Any], tensors: Sequence[Tensor]) -> Any:
    if kind == "enum" and issubclass(own, Enum):
        return own(_put(rest[0], tensors))
    if kind == "named" and issubclass(own, tuple):
        items = [_put(one, tensors) for one in rest]
        return own._make(items) if hasattr(own, "_make") else own(items)
    if kind == "object" and is_dataclass(own):
        made, dict_of = _made_without_init(own), OrderedDict[Any, Any]
        for key, one in rest[0] or ():
            dict_of.__setitem__(made, _put(key, tensors), _put(one, tensors))
        for name, one in rest[1:]:
            object.__setattr__(made, name, _put(one, tensors))
        return made
    raise UnsendableValue(f"a {_name(own)}, which is another class on this stage", value=own)


def _made_without_init(own: Any) -> Any:
    return own.__new__(own)


def _required(module: str, name: str) -> type:
    found = _found(module, name)
    if found is None:
        raise UnsendableValue(
            f"a {module}.{name}, which this stage has not imported",
            hint="import its module on every stage, before the first batch",
            value=f"{module}.{name}",
        )
    return found


def _found(module: str, name: str) -> type | None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


@lru_cache(maxsize=256)
def _tree(structure: bytes) -> Node:
    tree: Node = tagged_json.from_bytes(structure)
    return tree


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a communicator sends tensors of this kind."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        return False
    if tensor.is_complex() or not (type(tensor) is Tensor or isinstance(tensor, torch.nn.Parameter)):
        return False  # a subclass would arrive as a plain tensor
    try:
        dtype_of(tensor.dtype)
    except PolyaccelError:
        return False
    return True


def _behind_graph(tensor: Tensor) -> Tensor:
    """`tensor`, or a view of a leaf: a parameter's own gradient arrives through its hooks alone."""
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf else tensor


def _layout(tensor: Tensor) -> str:
    return f"{str(tensor.layout).removeprefix('torch.')} on {tensor.device.type}"


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_ONE_TENSOR = tagged_json.to_bytes(["tensor", 0], "value")
