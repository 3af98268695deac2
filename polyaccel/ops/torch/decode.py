"""Products and attention of decoding by csrc/decode: few rows, so that the time is that of reading weights and caches.

Float32 and bfloat16 on the host. A row has the same bits alone and in a batch ([Note: Rows of a linear layer] in
csrc/decode/linear.h).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.ops.base import KernelTable
from polyaccel.ops.decode import DECODE_ATTENTION, DECODE_GROUPED, DECODE_LINEAR, PackedWeight
from polyaccel.ops.native import Native, native

MOST_ROWS = 48
"""Above it torch's products are faster: they pack weights, which pays for many rows."""

_TYPES = {torch.float32: 1, torch.bfloat16: 2}
"""PA_FLOAT32 and PA_BFLOAT16 of csrc/kernels/kernels.h."""


class _CLinear(ctypes.Structure):
    """`pa_linear`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, c_int64) for name in ("rows", "inner", "columns", "x_row", "y_row", "w_column", "w_row")),
        ("type", c_int32),
    )


class _CGrouped(ctypes.Structure):
    """`pa_grouped`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "bias", "y", "codes", "scales", "steps", "step_scales", "step_sums")),
        *((name, c_int64) for name in ("rows", "inner", "columns", "group", "x_row", "y_row")),
        ("bits", c_int32),
        ("type", c_int32),
    )


_SIZES = ("sequences", "heads", "key_heads", "head", "capacity", "rotated")
_STRIDES = ("q_row", "k_row", "v_row", "out_row", "q_head", "k_head", "v_head")
_MEMORY = ("q", "k", "v", "out", "keys", "values", "cosines", "sines", "positions", "slots")


class _CAttention(ctypes.Structure):
    """`pa_attention`."""

    _fields_ = (
        *((name, c_void_p) for name in _MEMORY),
        *((name, c_int64) for name in (*_SIZES, *_STRIDES)),
        ("scale", c_float),
        ("type", c_int32),
    )


def decode_kernels() -> KernelTable:
    """Return compiled kernels of `DECODE_OPS`; an empty table where csrc was not compiled."""
    found = native()
    if found.library is None:
        return KernelTable("torch", {})
    return KernelTable(
        f"csrc {found.isa}",
        {
            DECODE_LINEAR: lambda weight, bias: _RowsLinear(found, weight, bias),
            DECODE_GROUPED: lambda weight, bias: _GroupedLinear(found, weight, bias),
            DECODE_ATTENTION: lambda *arguments: _CachedAttention(found, *arguments),
        },
    )


class _RowsLinear:
    """See `DecodeLinearFn`. Other element types, strides and many rows are torch's."""

    def __init__(self, library: Native, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library
        self._weight = weight
        self._bias = bias
        columns, inner = weight.shape
        w_column, w_row = weight.stride()
        self._columns = columns
        self._dtype = weight.dtype
        self._fits = self._dtype in _TYPES and 1 in (w_row, w_column) and weight.device.type == "cpu"
        self._fits = self._fits and (bias is None or (bias.dtype is self._dtype and bias.is_contiguous()))
        if self._fits:
            memory = (None, weight.data_ptr(), None if bias is None else bias.data_ptr(), None)
            sizes = (0, inner, columns, inner, columns, w_column, w_row)
            self._call = _CLinear(*memory, *sizes, _TYPES[self._dtype])
            self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if not self._fits or rows > MOST_ROWS or x.dtype is not self._dtype or x.dim() != 2:
            return functional.linear(x, self._weight, self._bias)
        if x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty(rows, self._columns)
        call = self._call
        call.rows, call.x_row, call.x, call.y = rows, x.stride(0), x.data_ptr(), y.data_ptr()
        self._library.call("pa_linear_rows", byref(call), torch.get_num_threads())
        return y


class _GroupedLinear:
    """See `DecodeGroupedFn`. Rows of other types are computed as float32."""

    def __init__(self, library: Native, weight: PackedWeight, bias: Tensor | None) -> None:
        self._library = library
        self._weight = weight
        self._bias = bias
        self._groups = -(-weight.inputs // weight.group_size)
        self._padded = -(-weight.group_size // 4) * 4
        sizes = (0, weight.inputs, weight.outputs, weight.group_size, 0, weight.outputs, weight.bits, 0)
        memory = (None, None, None, weight.codes.data_ptr(), weight.scales.data_ptr(), None, None, None)
        self._call = _CGrouped(*memory, *sizes)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype not in _TYPES:
            return self(x.float()).to(x.dtype)
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, groups, call = x.shape[0], self._groups, self._call
        y = x.new_empty(rows, self._weight.outputs)
        scratch = torch.empty(rows * groups * (self._padded // 2 + 2))
        bias = self._bias if self._bias is None else self._bias.to(x.dtype)
        call.x, call.x_row, call.rows, call.type = x.data_ptr(), x.stride(0), rows, _TYPES[x.dtype]
        call.bias, call.y = None if bias is None else bias.data_ptr(), y.data_ptr()
        call.step_scales = scratch.data_ptr()
        call.step_sums = call.step_scales + 4 * rows * groups
        call.steps = call.step_sums + 4 * rows * groups
        self._library.call("pa_grouped_rows", byref(call), torch.get_num_threads())
        return y


class _CachedAttention:
    """See `DecodeAttentionFn`."""

    def __init__(
        self,
        library: Native,
        keys: Tensor,
        values: Tensor,
        turns: tuple[Tensor, Tensor] | None,
        heads: int,
        scale: float,
    ) -> None:
        self._library = library
        self._kept: Any = (keys, values, turns)
        _, key_heads, capacity, head = keys.shape
        rotated = 0 if turns is None else turns[0].shape[-1]
        self._call = _CAttention(type=_TYPES[keys.dtype], scale=scale)
        for name, value in zip(_SIZES, (0, heads, key_heads, head, capacity, rotated), strict=True):
            setattr(self._call, name, value)
        self._call.keys, self._call.values = keys.data_ptr(), values.data_ptr()
        if turns is not None:
            self._call.cosines, self._call.sines = turns[0].data_ptr(), turns[1].data_ptr()
        self._head, self._heads = head, heads
        self._scratch_numel = head + capacity

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        rows, threads, call = len(q), torch.get_num_threads(), self._call
        out = q.new_empty(rows, self._heads * self._head)
        scratch = torch.empty(threads * self._scratch_numel)
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.sequences, call.out_row = rows, self._heads * self._head
        (call.q_row, call.q_head, _), (call.k_row, call.k_head, _) = q.stride(), k.stride()
        call.v_row, call.v_head, _ = v.stride()
        call.slots, call.positions = slots.data_ptr(), positions.data_ptr()
        self._library.call("pa_attend", byref(call), scratch.data_ptr(), threads)
        return out
