"""Products of matrices that are known to be symmetric: computed up to the diagonal, and mirrored.

On the host by csrc/products/symmetric.cpp, for float32. Elsewhere, and without it, by torch: in rows of blocks where
that gains, which is on the host alone.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from polyaccel.ops.native import native

_BLOCK = 128
"""Rows of the blocks of torch's products."""
_LEAST_SIZE = 64
"""Rows and columns of a matrix for which the call of csrc takes less than it saves."""


class _CSymmetric(Structure):
    """`pa_symmetric` of csrc/kernels/kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "added", "c")),
        *((name, c_int64) for name in ("size", "inner", "a_row", "a_column", "b_row", "b_column")),
        *((name, c_float) for name in ("alpha", "beta")),
    )


def symmetric_product(
    added: Tensor | None, left: Tensor, right: Tensor, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Compute `beta * added + alpha * left @ right`, which the caller knows to be symmetric.

    Args:
        added: A symmetric matrix, or None.
        left: A matrix, or a batch of them.
        right: As many matrices.
        beta: Factor of `added`.
        alpha: Factor of the product.

    Returns:
        A new tensor.
    """
    size = left.size(-2)
    is_on_host = left.dim() == 2 and left.device.type == "cpu"
    if is_on_host and left.dtype is torch.float32 and size >= _LEAST_SIZE and native().library is not None:
        return _compiled(added, left, right, beta, alpha)
    if not is_on_host or size < 2 * _BLOCK:
        if added is None:
            return left @ right if alpha == 1.0 else (left @ right).mul_(alpha)
        add = torch.addmm if left.dim() == 2 else torch.baddbmm
        return add(added, left, right, beta=beta, alpha=alpha)
    out = left.new_empty(size, size)
    for first in range(0, size, _BLOCK):
        rows, end = slice(first, first + _BLOCK), min(size, first + _BLOCK)
        if added is None:
            torch.mm(left[rows], right[:, :end], out=out[rows, :end]).mul_(alpha)
        else:
            torch.addmm(added[rows, :end], left[rows], right[:, :end], beta=beta, alpha=alpha, out=out[rows, :end])
        if first:
            out[:first, rows].copy_(out[rows, :first].mT)
    return out


def _compiled(added: Tensor | None, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    found, threads = native(), torch.get_num_threads()
    assert found.library is not None  # the caller's condition
    size, inner = left.shape
    out = left.new_empty(size, size)
    added = None if added is None else added.contiguous()
    scratch = left.new_empty(found.library.pa_symmetric_scratch(size, inner, threads))
    call = _CSymmetric(
        *(left.data_ptr(), right.data_ptr(), None if added is None else added.data_ptr(), out.data_ptr()),
        *(size, inner, *left.stride(), *right.stride()),
        *(alpha, beta),
    )
    found.call("pa_symmetric_product", byref(call), scratch.data_ptr(), threads)
    return out
