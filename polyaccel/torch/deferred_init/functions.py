"""Facts about torch's functions that the log needs: which make a tensor and fill it, what they write and draw from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
LIKE = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
    *(_aten.rand_like, _aten.randn_like, _aten.randint_like),
    *(_aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full),
}
"""Factories that take type and device from a tensor."""
OVERWRITING = {
    *(_aten.zero_, _aten.fill_, _aten.copy_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_),
    *(_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_),
}
"""Operations in place that do not read what they write to."""
_FILL: dict[Any, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys([_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty], lambda *args: ()),
    **dict.fromkeys([_aten.zeros, _aten.zeros_like, _aten.new_zeros], lambda *args: (_aten.zero_.default,)),
    **dict.fromkeys([_aten.ones, _aten.ones_like, _aten.new_ones], lambda *args: (_aten.fill_.Scalar, 1)),
    **dict.fromkeys([_aten.full, _aten.full_like, _aten.new_full], lambda *args: (_aten.fill_.Scalar, args[-1])),
    **dict.fromkeys([_aten.rand, _aten.rand_like], lambda *args: (_aten.uniform_.default,)),
    **dict.fromkeys([_aten.randn, _aten.randn_like], lambda *args: (_aten.normal_.default,)),
    **dict.fromkeys([_aten.clone, _aten._to_copy], lambda source: (_aten.copy_.default, source)),
}
"""Functions that make a new tensor and fill it, as torch itself does: the operation in place and its arguments."""
EQUAL_IN_SHAPE = {
    **dict.fromkeys([_aten.rand, _aten.randn], _aten.empty.memory_format),
    **dict.fromkeys([_aten.rand_like, _aten.randn_like], _aten.empty_like.default),
}
"""A function of the same shape for those that would load torch's compiler on the meta device."""


def as_fill(function: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The operation in place that fills the call's new tensor, and its arguments; () for none, None for no fill."""
    known = _FILL.get(function.overloadpacket)
    return known(*args) if known is not None and "out" not in function._overloadname else None


def written_by(function: OpOverload, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The tensors that the call changes."""
    values = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[index] if index < len(args) else named.get(argument.name))
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def taking_generator(function: OpOverload) -> OpOverload | None:
    """`function` if it takes a generator, else its overload that does and is equal otherwise, else None."""
    wanted = [argument.name for argument in function._schema.arguments]
    if "generator" in wanted:
        return function
    for name in function.overloadpacket.overloads():
        overload: OpOverload = getattr(function.overloadpacket, name)
        arguments = [argument.name for argument in overload._schema.arguments]
        if sorted(arguments) == sorted([*wanted, "generator"]):
            return overload
    return None


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators: Sequence[torch.Generator] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]


def target_device(args: tuple[Any, ...], named: dict[str, Any]) -> torch.device:
    """Where the outputs of a call go."""
    if named.get("device") is not None:
        return torch.device(named["device"])
    return next((leaf.device for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)), torch.device("cpu"))
