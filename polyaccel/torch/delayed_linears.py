"""Linear layers that give the gradients of their inputs now and those of their parameters later.

[Note: What is left for later]
A backward pass for the inputs runs all of autograd once, and a linear layer leaves its parameters out of it: what their
gradients are made of, its input and the gradient of its output, stays with a root of a later pass, which makes the
product when that pass comes to it. So nothing is computed twice, also where activations are recomputed, and gradients
of parameters reach buckets one by one as in any pass. Layers of other kinds compute theirs at once, and leave them for
the later pass as they are (`BackwardPasses.leaving`): that is little work next to the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.torch.linears import DIFFERENTIABLE, LinearForward, Products, is_ordinary, matrix

Left = list[tuple[Tensor, Tensor]]
"""Roots of a later backward pass, with their gradients."""


class DelayedLinears:
    """The linear layers of `module`. Inside `leaving` their parameters' gradients wait; outside of it they are as
    ever. `release` gives the layers back as they were."""

    def __init__(self, module: nn.Module) -> None:
        self.left: Left | None = None
        """Where backward passes leave products now."""
        self._before: list[tuple[nn.Linear, LinearForward | None]] = []
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                own = layer.__dict__.get("forward")
                if isinstance(own, LinearForward) or (own is None and is_ordinary(layer)):
                    self._before.append((layer, own))
                    layer.__dict__["forward"] = _DelayedForward(layer, own.products if own is not None else None, self)

    def __len__(self) -> int:
        return len(self._before)

    @contextmanager
    def leaving(self, left: Left) -> Iterator[None]:
        """Backward passes inside add to `left` what gives the parameters their gradients."""
        self.left = left
        try:
            yield
        finally:
            self.left = None

    def release(self) -> None:
        for layer, before in self._before:
            if isinstance(layer.__dict__.get("forward"), _DelayedForward):
                del layer.__dict__["forward"]
                if before is not None:
                    layer.__dict__["forward"] = before
        self._before.clear()


class _DelayedForward(LinearForward):
    """`forward` of one layer. A copy of the layer gets the ordinary one, and so does an unpickled layer."""

    def __init__(self, layer: nn.Linear, products: Products | None, owner: DelayedLinears) -> None:
        super().__init__(layer, products if products is not None else DIFFERENTIABLE)
        self._has_own = products is not None
        self._owner = owner

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear's has
        weight, bias = self.layer.weight, self.layer.bias
        leaves = weight.is_leaf and weight.requires_grad and (bias is None or bias.is_leaf)
        is_traced = torch.compiler.is_compiling()  # a compiled backward pass has all gradients, and they are kept whole
        if is_traced or not (torch.is_grad_enabled() and leaves and input.dim() > 0):
            return super().__call__(input) if self._has_own else functional.linear(input, weight, bias)
        products = self.products if self._has_own and self.products.suits(input, weight, bias) else None
        return _Delayed.apply(self._owner, products, input, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


class _Delayed(torch.autograd.Function):
    """A linear layer. See [Note: What is left for later]."""

    @staticmethod
    def forward(
        ctx: Any, owner: DelayedLinears, products: Products | None, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        out = functional.linear(x, weight, bias) if products is None else products.output(x, weight, bias)
        ctx.owner, ctx.products, ctx.x_shape = owner, products or DIFFERENTIABLE, x.shape
        ctx.parameters = weight, bias  # what is saved may be a copy, made by a recomputation
        ctx.save_for_backward(x.to(out.dtype), weight)  # of another type under autocast
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        _, _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        products = DIFFERENTIABLE if torch.is_grad_enabled() else ctx.products
        grad = matrix(grad)
        of_x = of_weight = of_bias = None
        if wants_x:
            of_x = products.input_grad(grad, weight.to(grad.dtype).contiguous()).reshape(ctx.x_shape)
        left = ctx.owner.left
        if left is not None and not torch.is_grad_enabled():
            parameter, bias = ctx.parameters
            with torch.enable_grad():
                root = _Later.apply(products, x.detach(), grad, parameter, bias if wants_bias else None)  # type: ignore[no-untyped-call]
            left.append((root, torch.ones_like(root)))
        else:
            if wants_weight:
                of_weight = products.weight_grad(grad, matrix(x))
            if wants_bias:
                of_bias = grad.sum(0)
        return None, None, of_x, of_weight, of_bias


class _Later(torch.autograd.Function):
    """A root whose backward pass gives the parameters of a linear layer their gradients."""

    @staticmethod
    def forward(ctx: Any, products: Products, x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.products, ctx.x, ctx.grad = products, x, grad
        ctx.types = weight.dtype, None if bias is None else bias.dtype
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Any, ...]:
        products, x, grad = ctx.products, ctx.x, ctx.grad
        ctx.x = ctx.grad = None
        of_weight = products.weight_grad(grad, matrix(x)).to(ctx.types[0])
        of_bias = None if ctx.types[1] is None else grad.sum(0).to(ctx.types[1])
        return None, None, None, of_weight, of_bias
