"""Linear layers that give the gradients of their inputs now and those of their parameters later.

[Note: Deferred weight gradients]
A backward pass for the inputs runs all of autograd once, and a linear layer leaves its parameters out of it: what their
gradients are made of, its input and the gradient of its output, stays with a root of a later pass, which makes the
product when that pass comes to it. So nothing is computed twice, also where activations are recomputed, and gradients
of parameters reach buckets one by one as in any pass. Layers of other kinds compute theirs at once, and leave them for
the later pass as they are (`BackwardRunner.defer_weight_grads`): that is little work next to the products. Linear
layers are those of torch, and GPT-2's in transformers (`Conv1D`), whose weights are transposed.

[Note: In-place weight gradients]
Where only the engine reads the gradient of a weight, its product is added to the bucket by the product itself
(`DeferredWGrad.write`), and no gradient is made that would then be added: of a micro-batch of few tokens that is a part
of the work that shows. Sums of several micro-batches then round a little otherwise.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.core.buffer import Buffer
from polyaccel.torch.linears import DIFFERENTIABLE, LinearForward, MatmulKernels, is_ordinary, matrix
from polyaccel.torch.sharding.backward import LaterProduct


@dataclass(frozen=True)
class DeferredWGrad:
    """What the gradients of a linear layer's parameters are made of: its input and the gradient of its output, as
    matrices of as many rows. `bias` is None where that has no gradient."""

    products: MatmulKernels
    x: Tensor
    grad: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    adds_in_place: bool = True
    """Whether the weight's gradient may be added up by torch's product, and is not left to `products`."""
    is_transposed: bool = False
    """Whether the weight has a row for each feature of the input, as `Conv1D` has it."""

    def root(self) -> tuple[Tensor, Tensor]:
        """A root of a backward pass, with its gradient, that gives the parameters theirs."""
        with torch.enable_grad():
            root = _Later.apply(self, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return root, torch.ones_like(root)

    def weight_grad(self) -> Tensor:
        """The weight's gradient, in its type."""
        if self.is_transposed:
            return (self.x.t() @ self.grad).to(self.weight.dtype)
        return self.products.weight_grad(self.grad, self.x).to(self.weight.dtype)

    def write(self, place: Buffer, adds: bool) -> None:
        """Write the weight's gradient to `place`, in the bucket. See [Note: In-place weight gradients]."""
        target, grad = place.raw.view(self.weight.shape), self.grad
        if self.adds_in_place and target.dtype is grad.dtype is self.x.dtype:
            factors = (self.x.t(), grad) if self.is_transposed else (grad.t(), self.x)
            if adds:
                torch.addmm(target, *factors, out=target)
            else:
                torch.mm(*factors, out=target)
        else:
            _put(target, self.weight_grad(), adds)
        place.bump_version()

    def write_bias(self, place: Buffer, adds: bool) -> None:
        """Write the bias's gradient to `place`, in the bucket."""
        assert self.bias is not None  # as the caller has seen
        _put(place.raw, self.grad.sum(0).to(self.bias.dtype), adds)
        place.bump_version()


def _put(target: Tensor, value: Tensor, adds: bool) -> None:
    if adds:
        target.add_(value)
    else:
        target.copy_(value)


class SplitBackwardLinears:
    """The linear layers of `module`. Inside `defer_weight_grads` their parameters' gradients wait; outside of it they
    are as ever. `release` gives the layers back as they were. `adds_in_place`: gradients of weights are added up by
    torch's product also where layers have another one; by their own otherwise."""

    def __init__(self, module: nn.Module, *, adds_in_place: bool = True) -> None:
        self.adds_in_place = adds_in_place
        self.left: list[LaterProduct] | None = None
        """Where backward passes leave products now."""
        self._before: list[tuple[nn.Module, LinearForward | None]] = []
        for layer in module.modules():
            if _is_transposed(layer) and "forward" not in layer.__dict__:
                self._before.append((layer, None))
                layer.__dict__["forward"] = _DelayedForward(layer, None, self)
            elif isinstance(layer, nn.Linear):
                own = layer.__dict__.get("forward")
                if isinstance(own, LinearForward) or (own is None and is_ordinary(layer)):
                    self._before.append((layer, own))
                    layer.__dict__["forward"] = _DelayedForward(layer, own.products if own is not None else None, self)

    def __len__(self) -> int:
        return len(self._before)

    @contextmanager
    def defer_weight_grads(self, left: list[LaterProduct]) -> Iterator[None]:
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

    def __init__(self, layer: Any, products: MatmulKernels | None, owner: SplitBackwardLinears) -> None:
        super().__init__(layer, products if products is not None else DIFFERENTIABLE)
        self._has_own = products is not None
        self._is_transposed = _is_transposed(layer)
        self._owner = owner

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear's has
        weight, bias = self.layer.weight, self.layer.bias
        leaves = weight.is_leaf and weight.requires_grad and (bias is None or bias.is_leaf)
        is_traced = torch.compiler.is_compiling()  # a compiled backward pass has all gradients, and they are kept whole
        if is_traced or not (torch.is_grad_enabled() and leaves and input.dim() > 0):
            if self._is_transposed:
                return _transposed(input, weight, bias)
            return super().__call__(input) if self._has_own else functional.linear(input, weight, bias)
        products = self.products if self._has_own and self.products.suits(input, weight, bias) else None
        return _Delayed.apply(self._owner, products, input, weight, bias, self._is_transposed)  # type: ignore[no-untyped-call, no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer))
        return self if copy is None else types.MethodType(type(self.layer).forward, copy)


def _is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is the `Conv1D` of transformers, a linear layer whose weight is transposed."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def _transposed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The output of a `Conv1D`."""
    return torch.addmm(bias, matrix(x), weight).view(*x.shape[:-1], weight.shape[1])


class _Delayed(torch.autograd.Function):
    """A linear layer. See [Note: Deferred weight gradients]."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: SplitBackwardLinears,
        products: MatmulKernels | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_transposed: bool,
    ) -> Tensor:
        if is_transposed:
            assert bias is not None  # a Conv1D has one
            out = _transposed(x, weight, bias)
        else:
            out = functional.linear(x, weight, bias) if products is None else products.output(x, weight, bias)
        ctx.owner, ctx.products, ctx.x_shape = owner, products or DIFFERENTIABLE, x.shape
        ctx.parameters = weight, bias  # what is saved may be a copy, made by a recomputation
        ctx.is_transposed = is_transposed
        ctx.save_for_backward(x.to(out.dtype), weight)  # of another type under autocast
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        _, _, wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        products = DIFFERENTIABLE if torch.is_grad_enabled() else ctx.products
        grad = matrix(grad)
        of_x = of_weight = of_bias = None
        if wants_x:
            weight = weight.to(grad.dtype)
            of_x = grad @ weight.t() if ctx.is_transposed else products.input_grad(grad, weight.contiguous())
            of_x = of_x.reshape(ctx.x_shape)
        left = ctx.owner.left
        if left is not None and not torch.is_grad_enabled():
            parameter, bias = ctx.parameters
            in_place = products is DIFFERENTIABLE or ctx.owner.adds_in_place
            own_bias = bias if wants_bias else None
            rows = matrix(x.detach())
            left.append(DeferredWGrad(products, rows, grad, parameter, own_bias, in_place, ctx.is_transposed))
        else:
            if wants_weight:
                of_weight = matrix(x).t() @ grad if ctx.is_transposed else products.weight_grad(grad, matrix(x))
            if wants_bias:
                of_bias = grad.sum(0)
        return None, None, of_x, of_weight, of_bias, None


class _Later(torch.autograd.Function):
    """A root whose backward pass gives the parameters of a linear layer their gradients."""

    @staticmethod
    def forward(ctx: Any, product: DeferredWGrad, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.product = product
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Any, ...]:
        product: DeferredWGrad = ctx.product
        ctx.product = None
        bias = product.bias
        return None, product.weight_grad(), None if bias is None else product.grad.sum(0).to(bias.dtype)
