"""The products of layers that are cut, with their exchanges inside.

[Note: Shared input gradient exchange]
Layers cut by columns that read one input (query, key and value; gate and up) each find a part of its gradient. The
first of them gives the input on to the next ones, so that in the backward pass it comes last, has the sum of their
parts, adds its own and lets the ranks add theirs: one exchange instead of three. That continues while the first layer's
weight gradient is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from polyaccel.torch.tensor_parallel.functions import summed
from polyaccel.torch.tensor_parallel.ranks import MatrixProducts, TensorRanks


def column_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorRanks, *, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return this rank's outputs and `x` for further layers, whose gradients join one exchange."""
    if ranks.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return product(chosen(x, weight, bias, ranks, transposed), x, weight, bias, transposed), x
    return _Column.apply(x, weight, bias, ranks, transposed)  # type: ignore[no-untyped-call, no-any-return]


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorRanks, *, transposed: bool = False
) -> Tensor:
    """Return a linear layer's whole output from this rank's inputs `x`; the bias comes after the sum."""
    if ranks.size == 1:
        return product(chosen(x, weight, bias, ranks, transposed), x, weight, bias, transposed)
    return _Row.apply(x, weight, bias, ranks, transposed)  # type: ignore[no-untyped-call, no-any-return]


class _Column(Function):
    """See [Note: Shared input gradient exchange]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorRanks, transposed: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.ranks, ctx.transposed = ranks, transposed
        ctx.products = chosen(x, weight, bias, ranks, transposed)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return changeable(product(ctx.products, x, weight, bias, transposed)), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_of_others: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ranks: TensorRanks = ctx.ranks
        of_x = grad_of_others if grad is None else input_grad(ctx, grad, weight, grad_of_others)
        if of_x is None:
            return None, None, None, None, None
        if torch.is_grad_enabled():
            of_x = summed(of_x, ranks)
            return of_x, *weight_grads(ctx, grad, x, of_bias=ctx.needs_input_grad[2]), None, None
        of_x = of_x.clone(memory_format=torch.contiguous_format) if of_x is grad_of_others else of_x.contiguous()
        work = ranks.start_sum(of_x)
        try:
            of_weights = weight_grads(ctx, grad, x, of_bias=ctx.needs_input_grad[2])
        finally:
            work.wait()
        return of_x, *of_weights, None, None


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorRanks, transposed: bool
    ) -> Tensor:
        ctx.transposed, ctx.products = transposed, chosen(x, weight, None, ranks, transposed)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        out = ranks.sum(product(ctx.products, x, weight, None, transposed).contiguous())
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = None if weight is None else input_grad(ctx, grad, weight, None)
        return of_x, *weight_grads(ctx, grad, x, of_bias=ctx.needs_input_grad[2]), None, None


def chosen(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorRanks, transposed: bool
) -> MatrixProducts | None:
    """The device's own products, where it has faster ones than torch's for a layer of this size."""
    products = ranks.products
    return products if products is not None and not transposed and products.suits(x, weight, bias) else None


def product(
    products: MatrixProducts | None, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """The outputs of a linear layer, by `products` or by torch."""
    if products is not None:
        return products.apply(x, weight, bias)
    return functional.linear(x, weight.t() if transposed else weight, bias)


def changeable(out: Tensor) -> Tensor:
    """Return a new `out` of a function, which no other tensor reads, so that a model may change it in place."""
    return torch.ops.aten._unsafe_view.default(out, out.shape)  # type: ignore[no-any-return]


def input_grad(ctx: Any, grad: Tensor, weight: Tensor, more: Tensor | None) -> Tensor:
    """The gradient of the input, and `more` of it."""
    rows = _rows(grad)
    if ctx.products is not None and not torch.is_grad_enabled():
        of_x: Tensor = ctx.products.input_grad(rows.contiguous(), weight.contiguous())
        of_x = of_x.view(*grad.shape[:-1], weight.shape[1])
        return of_x if more is None else of_x.add_(more)
    weight = weight.t() if ctx.transposed else weight
    found = rows @ weight if more is None else torch.addmm(_rows(more), rows, weight)
    return found.view(*grad.shape[:-1], weight.shape[1])


def weight_grads(
    ctx: Any, grad: Tensor | None, x: Tensor | None, *, of_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the weight, where there is an `x`, and of the bias, where it is wanted."""
    if grad is None:
        return None, None
    rows = _rows(grad)
    of_weight = None
    if x is not None and ctx.products is not None and not torch.is_grad_enabled():
        of_weight = ctx.products.weight_grad(rows.contiguous(), _rows(x).contiguous())
    elif x is not None:
        of_weight = _rows(x).t() @ rows if ctx.transposed else rows.t() @ _rows(x)
    return of_weight, rows.sum(0) if of_bias else None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def as_autocast(*tensors: Any) -> Any:
    """The tensors in the type that autocast computes in, where it is on: torch does not look into functions of ours."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
