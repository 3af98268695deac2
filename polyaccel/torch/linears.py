"""The model's linear layers over the accelerator's own matrix products, where it has faster ones than torch.

[Note: Unchanged linear layers]
A layer keeps its class, its parameters and its state dict; it has a `forward` of its own among its attributes, which
goes with no copy or pickle of it. Whatever is not a plain float32 product on this device goes the ordinary way: other
types, autocast, tensor subclasses, compiling and tracing, functorch's transforms, forward-mode differentiation, a
precision below "highest", oneDNN switched off. The path depends on nothing that differs between ranks or stages.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.ops.base import LINEAR, LINEAR_INPUT_GRAD, LINEAR_WEIGHT_GRAD, KernelTable
from polyaccel.ops.matmul_autotune import MatrixChoice, matrix_choice
from polyaccel.torch.experts.layer import StackedExperts
from polyaccel.torch.experts.models import ExpertParallelExperts
from polyaccel.torch.experts.products import GroupedProducts
from polyaccel.torch.sharding.gradients import kind_of
from polyaccel.torch.sharding.pending import PendingParameter
from polyaccel.torch.sharding.sharded import ShardedParameter
from polyaccel.torch.tensor_parallel.layers import SharedModule
from polyaccel.torch.tiled.logits import TiledHead

LEAST_WORK = 1 << 22
"""Multiplications below which a product is left to torch under "auto". A layer's three calls take about 0.15 ms longer
than torch's, and twice as fast a product saves that at about this size."""

_PLAIN = (Tensor, nn.Parameter)
_ABSENT = (ShardedParameter, PendingParameter)
_LAYERS_OPS = (LINEAR, LINEAR_INPUT_GRAD, LINEAR_WEIGHT_GRAD)
"""A table without any of them has nothing for linear layers, which then stay torch's: the same products by way of
Python took 2 % of a step's CPU time more."""


_NUMBERS = count()
_WATCHED: WeakValueDictionary[int, MatmulKernels] = WeakValueDictionary()


@dataclass(frozen=True)
class MatmulKernels:
    """The three products of a linear layer on matrices, for products of at least `least_work` multiplications."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_grad: Callable[[Tensor, Tensor], Tensor]
    weight_grad: Callable[[Tensor, Tensor], Tensor]
    device_type: str
    least_work: int

    @cached_property
    def _number(self) -> int:
        """Stands for these products in calls of an operation of torch's, which takes plain values."""
        _WATCHED[number := next(_NUMBERS)] = self
        return number

    @classmethod
    def from_table(cls, table: KernelTable, device_type: str, least_work: int) -> MatmulKernels:
        """Take the kernels of `table`, and torch's own for what it lacks."""
        full = _TORCHS.replaced("", {op: table[op] for op in table})
        return cls(full[LINEAR], full[LINEAR_INPUT_GRAD], full[LINEAR_WEIGHT_GRAD], device_type, least_work)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`functional.linear(x, weight, bias)`."""
        if not self.suits(x, weight, bias):
            return functional.linear(x, weight, bias)
        if torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return _Linear.apply(self, x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]
        return self.output(x, weight, bias)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output, without a graph."""
        operands = matrix(x), weight.contiguous(), bias
        is_watched = torch._C._len_torch_dispatch_stack() > 0
        out = _watched_product(*operands, self._number) if is_watched else self.forward(*operands)
        # Not a view of `out`, or autograd would refuse that a later layer changes it in place.
        return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], weight.shape[0]])  # type: ignore[no-any-return]

    def suits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the product may go another way. See [Note: Unchanged linear layers]."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return False
        for each in (x, weight, bias):
            if each is not None and not (
                kind_of(each) in _PLAIN
                and each.dtype is torch.float32
                and each.device.type == self.device_type
                and each.layout is torch.strided
            ):
                return False
        if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:  # torch raises what is wrong
            return False
        work = x.numel() * weight.shape[0]
        return (
            work >= self.least_work
            and work > 0
            and not torch.is_autocast_enabled(self.device_type)
            and not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
            and torch.get_float32_matmul_precision() == "highest"
            and torch._C._get_mkldnn_enabled()
        )


@torch.library.custom_op("polyaccel::linear", mutates_args=())
def _watched_product(x: Tensor, weight: Tensor, bias: Tensor | None, products: int) -> Tensor:
    """Multiply matrices as an operation that torch's dispatch modes see (selective recomputation, counts)."""
    return _WATCHED[products].forward(x, weight, bias)


@register_flop_formula(torch.ops.polyaccel.linear)
def _linear_flops(x: Any, weight: Any, bias: Any, products: int, *, out_shape: Any = None, **named: Any) -> int:
    return int(2 * x[0] * x[1] * weight[0])


class _Linear(torch.autograd.Function):
    """A linear layer with gradients by `MatmulKernels`; gradients of gradients by torch's own operations."""

    @staticmethod
    def forward(ctx: Any, products: MatmulKernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _, input_grad, weight_grad, _ = ctx.needs_input_grad
        ctx.products, ctx.x_shape = products, x.shape
        ctx.save_for_backward(x if weight_grad else None, weight if input_grad else None)
        return products.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        products = DIFFERENTIABLE if torch.is_grad_enabled() else ctx.products
        grad = matrix(grad)
        of_x = of_weight = of_bias = None
        if weight is not None:
            of_x = products.input_grad(grad, weight.contiguous()).reshape(ctx.x_shape)
        if x is not None:
            of_weight = products.weight_grad(grad, matrix(x))
        if ctx.needs_input_grad[3]:
            of_bias = grad.sum(0)
        return None, of_x, of_weight, of_bias


class LinearForward:
    """`forward` of one layer. A copy of the layer gets the ordinary one, and so does an unpickled layer."""

    def __init__(self, layer: nn.Linear, products: MatmulKernels) -> None:
        self.layer = layer
        self.products = products

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear's has
        layer = self.layer
        weight, bias = layer.weight, layer.bias
        for parameter in (weight, bias):
            if type(parameter) in _ABSENT:
                Tensor.detach(parameter)  # has its values brought here, after which it is an ordinary one
        return self.products.apply(input, weight, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer))
        return self if copy is None else types.MethodType(nn.Linear.forward, copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.layer, "forward")  # whose attributes are not there yet when this is called


class Linears:
    """The linear layers of `module` over the matrix products that every rank chooses. Collective to make.

    `configured` is the config's value. `release` gives the layers back their own forward.
    """

    def __init__(
        self, module: nn.Module, accelerator: Accelerator, communicator: Communicator, configured: MatrixChoice
    ) -> None:
        self._layers: list[nn.Linear] = []
        self._names: list[str] = []
        self._shared: list[SharedModule] = []
        self._heads: list[TiledHead] = []
        self._experts: list[ExpertParallelExperts | StackedExperts] = []
        choice = matrix_choice(configured)
        table = agreed_kernels(accelerator, communicator, choice)
        device_type = accelerator.torch_device_type
        if not set(table):
            return
        assert device_type is not None  # what this frontend's accelerators have
        grouped = GroupedProducts.from_table(table, device_type)
        products = None
        if any(op in table for op in _LAYERS_OPS):
            products = MatmulKernels.from_table(table, device_type, 0 if choice == "on" else LEAST_WORK)
        for name, layer in module.named_modules():
            if isinstance(layer, SharedModule):  # experts too, whose tensor ranks add up what each of them gives
                layer.share.ranks.products = products
                self._shared.append(layer)
            elif isinstance(layer, (ExpertParallelExperts, StackedExperts)):
                layer.products = grouped
                self._experts.append(layer)
            elif products is None:
                continue
            elif isinstance(layer, nn.Linear) and is_ordinary(layer):
                layer.__dict__["forward"] = LinearForward(layer, products)
                self._layers.append(layer)
            elif isinstance(head := layer.__dict__.get("forward"), TiledHead):
                head.products = products
                self._heads.append(head)
            else:
                continue
            self._names.append(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of the modules that have other products."""
        return tuple(self._names)

    def __len__(self) -> int:
        """How many linear layers have other products."""
        return len(self._layers)

    def release(self) -> None:
        """Take it all back."""
        for layer in self._layers:
            if isinstance(layer.__dict__.get("forward"), LinearForward):
                del layer.__dict__["forward"]
        self._layers.clear()
        for shared in self._shared:
            shared.share.ranks.products = None
        self._shared.clear()
        for experts in self._experts:
            experts.products = None
        self._experts.clear()
        for head in self._heads:
            head.products = None
        self._heads.clear()


def agreed_kernels(accelerator: Accelerator, communicator: Communicator, choice: MatrixChoice) -> KernelTable:
    """Return the kernels that every rank chose: others would round differently. Collective."""
    table = accelerator.matrix_kernels(choice)
    every = communicator.all_gather_object((choice, [op.name for op in table]))
    if len({stated for stated, _ in every}) > 1:
        return table.only(())
    return table.only([op for op in table if all(op.name in names for _, names in every)])


def is_ordinary(layer: nn.Linear) -> bool:
    """Whether the layer's forward is that of `nn.Linear`, not exchanged by anybody."""
    return getattr(layer.forward, "__func__", None) is nn.Linear.forward


def matrix(tensor: Tensor) -> Tensor:
    """All rows of `tensor`, contiguous."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad.t() @ x


_TORCHS = KernelTable(
    "torch", {LINEAR: functional.linear, LINEAR_INPUT_GRAD: torch.mm, LINEAR_WEIGHT_GRAD: _weight_grad}
)
DIFFERENTIABLE = MatmulKernels.from_table(_TORCHS, "", 0)
