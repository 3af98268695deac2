"""The three products of a linear layer with operands in 8 or 4 bits.

[Note: Low precision products]
Output, gradient of the input and gradient of the weight are products of two matrices each. Both operands are rounded
with scales along the dimension that is summed, and multiplied and added up in float32. So an operand that two products
share is rounded twice where its scales are not of the whole tensor. Rounding itself has no gradient
(straight-through): the gradients are those of the products that would be without it. Parameters, optimizer and bias
keep their types.

Ranks that hold blocks of a weight agree on each scale that blocks share, so that they round what one rank would. A
block of 32 elements lies on one rank, so blocks of an operand need no exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyaccel.torch.low_precision.formats import float8_scale, in_blocks, in_float8

Maximum = Callable[[Tensor], Tensor]
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_WEIGHT, _INPUT, _GRAD = "weight", "input", "grad"


@dataclass(frozen=True, slots=True)
class LowPrecision:
    """How a layer multiplies. Of a layer that ranks share, `parts` are the operands of which each rank has a block,
    `summed` is the product whose sum is over ranks, and `maximum` gives the largest of the ranks' elements."""

    recipe: str
    parts: frozenset[str] = frozenset()
    summed: Literal["forward", "input_grad", ""] = ""
    maximum: Maximum | None = None

    def of_columns(self, maximum: Maximum) -> LowPrecision:
        """Return the same for a layer of which each rank has some outputs."""
        return replace(self, parts=frozenset({_WEIGHT, _GRAD}), summed="input_grad", maximum=maximum)

    def of_rows(self, maximum: Maximum) -> LowPrecision:
        """Return the same for a layer of which each rank has some inputs."""
        return replace(self, parts=frozenset({_WEIGHT, _INPUT}), summed="forward", maximum=maximum)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `functional.linear(x, weight, bias)` with rounded operands."""
        if torch.is_autocast_enabled(x.device.type):
            x, weight = (one.to(torch.get_autocast_dtype(x.device.type)) for one in (x, weight))
        out: Tensor = _Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(out.dtype)

    def rounded(self, values: Tensor, dim: int, role: str, product: str) -> Tensor:
        """Return an operand of `product` that is summed along `dim`, as its rounded values in float32."""
        if not values.numel():
            return values.float()
        if self.recipe in ("mxfp8", "mxfp4"):
            return in_blocks(values, dim, 8 if self.recipe == "mxfp8" else 4)
        is_by_tensor = self.recipe == "tensorwise"
        magnitudes = values.detach().abs()
        amax = (magnitudes.amax() if is_by_tensor else magnitudes.amax(dim, keepdim=True)).float()
        if self.maximum is not None and (role in self.parts if is_by_tensor else product == self.summed):
            amax = self.maximum(amax.reshape(-1)).view_as(amax)
        dtype = _E5M2 if is_by_tensor and role == _GRAD else _E4M3
        return in_float8(values, float8_scale(amax, dtype, is_power=not is_by_tensor), dtype)


class _Linear(torch.autograd.Function):
    """See [Note: Low precision products]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: LowPrecision) -> Tensor:
        ctx.how, ctx.x_shape = how, x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            left, right = (how.rounded(rows, 1, _INPUT, "forward"), how.rounded(weight, 1, _WEIGHT, "forward"))
            out = (left @ right.t()).to(x.dtype)
        return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], weight.shape[0]])  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        how: LowPrecision = ctx.how
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = None
        if weight is not None:
            left, right = (how.rounded(rows, 1, _GRAD, "input_grad"), how.rounded(weight, 0, _WEIGHT, "input_grad"))
            of_x = (left @ right).to(grad.dtype).view(ctx.x_shape)
        if x is not None:
            inputs = x.reshape(-1, x.shape[-1])
            left, right = (how.rounded(rows, 0, _GRAD, "weight_grad"), how.rounded(inputs, 0, _INPUT, "weight_grad"))
            of_weight = (left.t() @ right).to(x.dtype)
        return of_x, of_weight, None
