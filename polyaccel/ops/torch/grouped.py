"""Products of the rows of many experts by csrc/products/products.cpp: one call for all of them.

Float32 on the host. A row's result, and the sum over a part of a group, have the same bits whatever else is in the
call ([Note: Accumulation order of a product] in csrc/products/tiles.h), which no library's product promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from itertools import chain

import torch
from torch import Tensor

from polyaccel.errors import ShardingError
from polyaccel.ops.base import GROUPED_INPUT_GRAD, GROUPED_LINEAR, GROUPED_WEIGHT_GRAD, KernelTable
from polyaccel.ops.native import Native, native

_ITEMSIZE = 4


def with_grouped_kernels(table: KernelTable) -> KernelTable:
    """`table` and these kernels; `table` itself where csrc was not compiled."""
    found = native()
    if found.library is None:
        return table
    kernels = _GroupedKernels(found)
    return table.replaced(
        f"csrc {found.isa}",
        {
            GROUPED_LINEAR: kernels.linear,
            GROUPED_INPUT_GRAD: kernels.input_grad,
            GROUPED_WEIGHT_GRAD: kernels.weight_grad,
        },
    )


class _GroupedKernels:
    """The kernels as methods; each has the signature of its op. Raises ShardingError for tensors that do not fit."""

    def __init__(self, library: Native) -> None:
        self._library = library

    def linear(self, rows: Tensor, weights: Tensor, counts: Sequence[int], *, out: Tensor | None = None) -> Tensor:
        """See `GroupedLinearFn`."""
        return self._rowwise(rows, weights, counts, out)

    def input_grad(self, grad: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """See `GroupedInputGradFn`."""
        return self._rowwise(grad, weights.transpose(1, 2), counts)

    def weight_grad(self, grad: Tensor, rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """See `GroupedWeightGradFn`."""
        sizes = [sum(parts) for parts in counts]
        if len(grad) != len(rows):
            raise ShardingError(f"gradients of {len(grad)} rows for {len(rows)} rows", value=len(grad))
        _require(grad, rows, sizes=sizes)
        grad, rows = grad.contiguous(), rows.contiguous()
        outputs, inputs = grad.shape[1], rows.shape[1]
        out = grad.new_empty(len(counts), outputs, inputs)
        products: list[tuple[int, ...]] = []
        first = 0
        for group, (size, parts) in enumerate(zip(sizes, counts, strict=True)):
            products.append(
                (
                    grad.data_ptr() + _ITEMSIZE * first * outputs,
                    rows.data_ptr() + _ITEMSIZE * first * inputs,
                    out.data_ptr() + _ITEMSIZE * group * outputs * inputs,
                    *(outputs, size, inputs),
                    *(1, outputs, inputs, 1, inputs, len(parts)),
                )
            )
            first += size
        self._run(products, list(chain.from_iterable(counts)), grad)
        return out

    def _rowwise(self, rows: Tensor, weights: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Rows times transposed `weights` (groups, columns, inner) of any strides."""
        if rows.dim() != 2 or weights.dim() != 3 or rows.shape[1] != weights.shape[2] or len(weights) != len(counts):
            shapes = f"rows {tuple(rows.shape)}, weights {tuple(weights.shape)}, {len(counts)} groups"
            raise ShardingError(f"{shapes} do not fit", value=shapes)
        _require(rows, weights, sizes=counts)
        rows = rows.contiguous()
        inner, columns = rows.shape[1], weights.shape[1]
        of_group, of_column, of_inner = weights.stride()
        if out is None:
            out = rows.new_empty(len(rows), columns)
        elif out.shape != (len(rows), columns) or not out.is_contiguous() or out.dtype is not rows.dtype:
            shapes = f"{len(rows)} rows of {columns} outputs into {tuple(out.shape)} of {out.dtype}"
            raise ShardingError(f"{shapes} do not fit", value=shapes)
        products: list[tuple[int, ...]] = []
        segments, first = [], 0
        for group, count in enumerate(counts):
            if count:
                products.append(
                    (
                        rows.data_ptr() + _ITEMSIZE * first * inner,
                        weights.data_ptr() + _ITEMSIZE * group * of_group,
                        out.data_ptr() + _ITEMSIZE * first * columns,
                        *(count, inner, columns),
                        *(inner, 1, of_inner, of_column, columns, 1),
                    )
                )
                segments.append(inner)
            first += count
        self._run(products, segments, rows)
        return out

    def _run(self, products: list[tuple[int, ...]], segments: list[int], like: Tensor) -> None:
        count, threads = len(products), torch.get_num_threads()
        table = (c_int64 * (12 * count))(*chain.from_iterable(products))
        library = self._library.library
        assert library is not None  # or this object would not have been made
        scratch = like.new_empty(library.pa_products_scratch(count, table, threads))
        self._library.call(
            "pa_products", count, table, (c_int64 * len(segments))(*segments), scratch.data_ptr(), threads
        )


def _require(*tensors: Tensor, sizes: Sequence[int]) -> None:
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            raise ShardingError(f"{tensor.dtype} on {tensor.device} is not float32 on the host", value=tensor.dtype)
    if sum(sizes) != len(tensors[0]) or min(sizes, default=0) < 0:
        raise ShardingError(f"groups of {list(sizes)} rows of {len(tensors[0])}", value=list(sizes))
