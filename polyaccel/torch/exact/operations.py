"""Products, sums, softmax and attention whose rows have the same bits in any batch.

[Note: Order of an exact sum]
A product's element is one chain of multiply-adds along the inner dim, from its start on (the kernel `GROUPED_LINEAR`
of the accelerator). Zeros at its begin and end change nothing, so padded keys of attention change nothing: their
weights are exactly 0. Every other sum of a row is a product with ones. Numbers of 16 bits are multiplied in float32 and
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyaccel.ops.base import GroupedLinearFn
from polyaccel.torch.exact.pointwise import apply_padded

aten = torch.ops.aten


class ExactOperations:
    """Operations of aten over the product `linear`; `table` has one for each that is replaced."""

    def __init__(self, linear: GroupedLinearFn) -> None:
        self._linear = linear
        self.table: dict[Any, Callable[..., Any]] = {
            aten.mm.default: self.mm,
            aten.bmm.default: self.bmm,
            aten.addmm.default: self.addmm,
            aten.baddbmm.default: self.addmm,
            aten.addmm_.default: self.addmm_,
            aten.baddbmm_.default: self.addmm_,
            aten.sum.dim_IntList: self.sum,
            aten.mean.dim: self.mean,
            aten._softmax.default: self.softmax,
            aten._safe_softmax.default: self.safe_softmax,
            aten._log_softmax.default: self.log_softmax,
            aten.logsumexp.default: self.logsumexp,
            aten._scaled_dot_product_flash_attention_for_cpu.default: self.attention,
        }
        if hasattr(aten, "_grouped_mm"):
            self.table[aten._grouped_mm.default] = self.grouped_mm

    # Products.

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        """`left @ right` of matrices."""
        return self.bmm(left[None], right[None])[0]

    def bmm(self, left: Tensor, right: Tensor) -> Tensor:
        """`left @ right` of as many matrices each."""
        count, rows, inner = left.shape
        if 0 in (count, rows, inner, right.shape[2]):
            return left.new_zeros(count, rows, right.shape[2])
        flat = left.float().reshape(count * rows, inner)
        found: Tensor = self._linear(flat, right.float().transpose(1, 2), [rows] * count)
        return found.view(count, rows, -1).to(left.dtype)

    def addmm(self, added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """`beta * added + alpha * left @ right`, of matrices or of as many each."""
        wide = (left.float(), right.float())
        found = self.mm(*wide) if left.dim() == 2 else self.bmm(*wide)
        if alpha != 1:
            found = found * alpha
        if beta != 0:
            found = found + (added.float() if beta == 1 else added.float() * beta)
        return found.to(left.dtype)

    def addmm_(self, added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """`addmm` into `added`."""
        return added.copy_(self.addmm(added, left, right, beta=beta, alpha=alpha))

    def grouped_mm(
        self,
        left: Tensor,
        right: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Rows of groups, which end at `offs`, each times the matrix of its group."""
        if offs is None or left.dim() != 2 or right.dim() != 3:
            raise NotImplementedError
        ends = offs.tolist()
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        rest = len(left) - sum(counts)
        found = left.new_zeros(len(left), right.shape[2], dtype=torch.float32)
        if rest < len(left):
            found[: len(left) - rest] = self._linear(
                left[: len(left) - rest].float(), right.float().transpose(1, 2), counts
            )
        if bias is not None:
            found = found + bias.float()
        return found.to(out_dtype or left.dtype)

    # Sums of rows.

    def sum(
        self, values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The sum along `dim`, all dims without any."""
        out = dtype or (values.dtype if values.is_floating_point() else torch.int64)
        if not values.is_floating_point() or not out.is_floating_point:
            return aten.sum.dim_IntList(values, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]
        dims = sorted(one % values.dim() for one in dim) if dim else list(range(values.dim()))
        if not dims:
            return values.to(out, copy=True)
        kept = [one for one in range(values.dim()) if one not in dims]
        rows = values.float().permute(*kept, *dims).reshape(*(values.shape[one] for one in kept), -1)
        total = self._row_sums(rows)[..., 0]
        if keepdim:
            total = total.view([1 if one in dims else size for one, size in enumerate(values.shape)])
        return total.to(out)

    def mean(
        self, values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The mean along `dim`."""
        dims = dim or list(range(values.dim()))
        count = math.prod(values.shape[one] for one in dims)
        return (self.sum(values.float(), dims, keepdim) / count).to(dtype or values.dtype)

    def _row_sums(self, rows: Tensor) -> Tensor:
        """Sums along the last dim, which stays as one of size 1."""
        ones = rows.new_ones(rows.shape[-1], 1)
        return self.mm(rows.reshape(-1, rows.shape[-1]), ones).view(*rows.shape[:-1], 1)

    # Softmax and attention.

    def _exponents(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`exp(scores - largest)` along the last dim, its sums and the largest."""
        largest = scores.amax(-1, keepdim=True)
        found: Tensor = apply_padded(aten.exp.default, (scores - largest,), {})
        return found, self._row_sums(found), largest

    def softmax(self, scores: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
        """Softmax along `dim`."""
        if 0 in scores.shape:
            return scores.clone()
        found, sums, _ = self._exponents(scores.float().transpose(dim, -1))
        return (found / sums).transpose(dim, -1).to(torch.float32 if half_to_float else scores.dtype)

    def safe_softmax(self, scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Softmax along `dim`, zeros where all is masked."""
        found = self.softmax(scores if dtype is None else scores.to(dtype), dim)
        return found.masked_fill((scores == -torch.inf).all(dim, keepdim=True), 0.0)

    def log_softmax(self, scores: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
        """Logarithm of the softmax along `dim`."""
        if 0 in scores.shape:
            return scores.clone()
        wide = scores.float().transpose(dim, -1)
        _, sums, largest = self._exponents(wide)
        log: Tensor = apply_padded(aten.log.default, (sums,), {})
        return (wide - largest - log).transpose(dim, -1).to(torch.float32 if half_to_float else scores.dtype)

    def logsumexp(self, values: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
        """Logarithm of the sum of exponentials along one dim."""
        if len(dim) != 1 or 0 in values.shape:
            raise NotImplementedError
        _, sums, largest = self._exponents(values.float().transpose(dim[0], -1))
        log: Tensor = apply_padded(aten.log.default, (sums,), {})
        found = (log + largest).transpose(dim[0], -1).to(values.dtype)
        return found if keepdim else found.squeeze(dim[0])

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of shape (batch, heads, tokens, size), and the logarithms of its sums for torch's gradient."""
        if dropout_p:
            raise NotImplementedError
        batch, heads, tokens, size = query.shape
        groups = heads // key.shape[1]
        if groups != 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        # As torch's formula for other devices has it: a pass without this operation has the same bits.
        factor = math.sqrt(1 / math.sqrt(size) if scale is None else scale)
        left = (query.float() * factor).reshape(batch * heads, tokens, size)
        right = (key.float() * factor).reshape(batch * heads, -1, size)
        scores = self.bmm(left, right.transpose(1, 2)).view(batch, heads, tokens, -1)
        if is_causal:
            seen = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        if attn_mask is not None:
            is_seen = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_seen else scores + attn_mask.float()
        found, sums, largest = self._exponents(scores)
        weights = found / sums
        if attn_mask is not None:
            weights = weights.masked_fill(largest == -torch.inf, 0.0)
        out = self.bmm(weights.view(batch * heads, tokens, -1), value.float().reshape(batch * heads, -1, size))
        log: Tensor = apply_padded(aten.log.default, (sums,), {})
        of_sums = (largest + log).masked_fill(largest == -torch.inf, 0.0)[..., 0]
        # As torch's own lays them out: tokens before heads.
        out = out.to(query.dtype).view(batch, heads, tokens, size).transpose(1, 2).contiguous().transpose(1, 2)
        return out, of_sums.transpose(1, 2).contiguous().transpose(1, 2)
