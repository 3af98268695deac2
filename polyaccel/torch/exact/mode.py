"""The dispatch mode of exact forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyaccel.errors import PolyaccelError
from polyaccel.torch.exact.operations import ExactOperations
from polyaccel.torch.exact.pointwise import apply_padded

_EXACT_IN_16_BITS = {
    "abs", "bitwise_and", "bitwise_not", "bitwise_or", "clone", "copy", "copy_", "detach", "eq", "fill", "fill_",
    "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
    "masked_fill_", "maximum", "minimum", "ne", "neg", "relu", "relu_", "where", "_to_copy", "zero_",
}  # fmt: skip
"""Elementwise operations that round nothing."""
_PLAIN = _EXACT_IN_16_BITS | {
    "add", "add_", "clamp", "clamp_", "clamp_max", "clamp_min", "div", "div_", "floor", "mul", "mul_", "round",
    "sign", "sub", "sub_",
}  # fmt: skip
"""Elementwise operations that a processor has exactly, alone and in vectors, for float32."""
_MOVING = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "all", "amax", "amin", "any", "arange",
    "argmax", "argmin", "as_strided", "as_strided_", "bernoulli_", "cat", "constant_pad_nd", "copy", "empty",
    "empty_like", "empty_strided", "embedding", "equal", "eye", "fill", "flip", "full", "full_like", "gather",
    "histc", "index", "index_copy", "index_copy_", "index_put", "index_put_", "index_select", "is_pinned",
    "is_same_size", "isin", "lift", "lift_fresh", "lift_fresh_copy", "linspace", "masked_select", "max", "min",
    "multinomial", "native_dropout", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "nonzero", "normal_", "one_hot", "ones", "ones_like", "pin_memory", "rand", "rand_like", "randn", "randint",
    "repeat", "repeat_interleave", "resize_", "roll", "scalar_tensor", "scatter", "scatter_", "select_backward",
    "select_scatter", "set_", "slice_backward", "slice_scatter", "sort", "split", "split_with_sizes", "stack",
    "topk", "tril", "triu", "unfold", "uniform_", "zeros", "zeros_like",
}  # fmt: skip
"""Operations that move or compare numbers, each for itself."""
_BY_ROW = {"cumsum", "index_add", "index_add_", "native_layer_norm", "scatter_add", "scatter_add_"}
"""Operations that torch computes row by row on the host, each in an order that other rows do not change."""
_OF_A_BATCH = {"mean", "nll_loss2d_forward", "nll_loss_forward", "sum"}
"""Losses: one number of the whole batch."""


class ExactMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every row's numbers have the same bits whatever the batch is.

    [Note: Exact operations]
    Contractions and reductions are replaced by `ExactOperations`, elementwise functions by padded ones. An operation of
    floating tensors that is not known to be exact is an error: it would be silently inexact.
    """

    def __init__(self, operations: ExactOperations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table = operations.table

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        if func.namespace != "aten" or not _are_replaceable(types):
            return func(*args, **named)
        dtypes = {value.dtype for value in (*args, *named.values()) if _is_floating(value)}
        replacement = self._table.get(func)
        if replacement is not None and dtypes:
            if dtypes - {torch.float32, torch.bfloat16, torch.float16}:
                raise _inexact(func, dtypes)
            try:
                return replacement(*args, **named)
            except NotImplementedError:
                raise _inexact(func, dtypes) from None
        name = func._schema.name.partition("::")[2]
        if not dtypes or func.is_view or name in _MOVING or name in _BY_ROW:
            return func(*args, **named)
        if torch.Tag.pointwise in func.tags or name in _PLAIN:
            is_wide = not dtypes - {torch.float32, torch.float64}
            plain = _PLAIN if is_wide and named.get("alpha", 1) == 1 else _EXACT_IN_16_BITS
            return func(*args, **named) if name in plain else apply_padded(func, args, named)
        if name in _OF_A_BATCH:
            return func(*args, **named)
        raise _inexact(func, dtypes)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _are_replaceable(types: Sequence[type]) -> bool:
    """Whether plain tensors take part alone: others, such as those of a trace, have other operations."""
    return all(kind in (Tensor, nn.Parameter) for kind in types)


def _inexact(func: Any, dtypes: set[torch.dtype]) -> PolyaccelError:
    name = func._schema.name
    of = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return PolyaccelError(
        f"no exact kernel for {name} of {of}: its bits may depend on the batch",
        hint='leave "generation": {"exact": true} out, or replace it by products and elementwise functions',
        value=name,
    )
