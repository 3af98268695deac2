"""Products and attention of decoding by csrc/decode: few rows, so that the time is that of reading weights and caches.

Float32 and bfloat16 on the host. A row has the same bits alone and in a batch ([Note: Rows of a linear layer] in
csrc/decode/linear.h).
"""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.ops.base import LINEAR, KernelTable
from polyaccel.ops.decode import DECODE_ATTENTION, DECODE_GROUPED, DECODE_LINEAR, DECODE_STEPS, LayerPages, PackedWeight
from polyaccel.ops.native import Native, native
from polyaccel.ops.torch import decode_calls as calls
from polyaccel.ops.torch.decode_calls import TYPES, address
from polyaccel.ops.torch.decode_steps import Steps
from polyaccel.ops.torch.linear import onednn_kernels

MOST_ROWS = 48
"""Above it torch's products are faster: they pack weights, which pays for many rows."""


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
            DECODE_STEPS: lambda steps: Steps(found, steps),
        },
    )


def _many_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer by the faster one of torch's libraries: oneDNN, which takes bfloat16 by itself."""
    products = onednn_kernels()
    is_plain = x.dtype is weight.dtype is torch.float32 and x.dim() == 2 and x.device.type == "cpu"
    if is_plain and LINEAR in products and torch._C._get_mkldnn_enabled():
        return products[LINEAR](x, weight, bias)  # type: ignore[no-any-return]
    return functional.linear(x, weight, bias)


class _RowsLinear:
    """See `DecodeLinearFn`. Other element types, strides and many rows are torch's."""

    def __init__(self, library: Native, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library
        self._weight = weight
        self._bias = bias
        self._columns = weight.shape[0]
        self._dtype = weight.dtype
        self._fits = calls.fits(weight, bias)
        if self._fits:
            self._call = calls.linear_call(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if not self._fits or rows > MOST_ROWS or x.dtype is not self._dtype or x.dim() != 2:
            return _many_rows(x, self._weight, self._bias)
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
        self._call = calls.grouped_call(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype not in TYPES:
            return self(x.float()).to(x.dtype)
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, call = x.shape[0], self._call
        y = x.new_empty(rows, self._weight.outputs)
        scratch = torch.empty(calls.scratch_numel(self._weight, rows))
        bias = self._bias if self._bias is None else self._bias.to(x.dtype)
        call.x, call.x_row, call.rows, call.type = x.data_ptr(), x.stride(0), rows, TYPES[x.dtype]
        call.bias, call.y = address(bias), y.data_ptr()
        calls.set_scratch(call, self._weight, rows, scratch)
        self._library.call("pa_grouped_rows", byref(call), torch.get_num_threads())
        return y


class _CachedAttention:
    """See `DecodeAttentionFn`."""

    def __init__(
        self,
        library: Native,
        pages: LayerPages,
        turns: tuple[Tensor, Tensor] | None,
        heads: int,
        scale: float,
    ) -> None:
        self._library = library
        self._kept: Any = (pages, turns)
        self._call = calls.attention_call(pages, turns, heads, scale)
        self._columns = heads * pages.head
        self._scratch_numel = calls.attention_scratch_numel(pages)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        out = q.new_empty(len(q), self._columns)
        scratch = torch.empty(threads * self._scratch_numel)
        self._call.set_tokens(q, k, v, out, slots, positions)
        self._library.call("pa_attend", byref(self._call), scratch.data_ptr(), threads)
        return out
