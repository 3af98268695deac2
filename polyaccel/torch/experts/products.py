"""What experts of transformers make of their rows, by the device's grouped products.

transformers marks modules of experts that it computes in several ways (`use_experts_implementation`): what the stacks
are called, whether they are transposed, have biases and gates, is in attributes. Here is one way more. Whatever is not
plain float32 on the device goes the module's own.

[Note: Per-rank expert gradients]
The gradient of an expert's weights is a sum over all tokens. Were it one product over them all, its bits would depend
on which rank has the expert. So each rank's tokens give their own product, and these are added in the order in which
the ranks' communicator would have added them, had each rank its own copy of the expert: there and here the same
additions happen. Divisions by numbers of ranks that are powers of two change no bit either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyaccel.ops.base import GROUPED_INPUT_GRAD, GROUPED_LINEAR, GROUPED_OPS, GROUPED_WEIGHT_GRAD, KernelTable
from polyaccel.torch.experts.token_dispatch import DispatchBuffers
from polyaccel.torch.profiling.operations import count_operations
from polyaccel.torch.tensor_parallel.layers import present

Parts = Sequence[Sequence[int]]
"""Of each expert, in order, how many rows come from each rank."""
_MODULES = (
    *(nn.ELU, nn.GELU, nn.Hardswish, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Sigmoid),
    *(nn.Softplus, nn.Tanh),
)
_FUNCTIONS = (
    *(operator.add, operator.mul, operator.neg, operator.pow, operator.sub, torch.add, torch.mul, torch.neg, torch.pow),
    *(torch.relu, torch.sigmoid, torch.square, torch.tanh, functional.elu, functional.gelu, functional.hardswish),
    *(functional.leaky_relu, functional.mish, functional.relu, functional.silu, functional.softplus),
)
_METHODS = ("add", "mul", "neg", "pow", "relu", "sigmoid", "square", "sub", "tanh")
Layer = Callable[[Tensor, str, bool], Tensor]
"""What a linear layer makes of rows: these, its name, and whether its outputs are the expert's."""


class GroupedProducts:
    """The products of a table that has all of `GROUPED_OPS`, for float32 on devices of one type."""

    def __init__(self, table: KernelTable, device_type: str) -> None:
        self.linear = table[GROUPED_LINEAR]
        self.input_grad = table[GROUPED_INPUT_GRAD]
        self.weight_grad = table[GROUPED_WEIGHT_GRAD]
        self._device_type = device_type

    @classmethod
    def from_table(cls, table: KernelTable, device_type: str) -> GroupedProducts | None:
        """Return None where the table lacks some."""
        return cls(table, device_type) if all(op in table for op in GROUPED_OPS) else None

    def suit(self, rows: Tensor, weights: Sequence[Tensor]) -> bool:
        """Whether experts may be computed so, now, with these `weights`."""
        return (
            not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
            and torch._C._len_torch_dispatch_stack() == 0
            and not torch.is_autocast_enabled(self._device_type)
            and not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
            and all(one.dtype is torch.float32 and one.device.type == self._device_type for one in (rows, *weights))
        )


def computed(
    module: Any, rows: Tensor, parts: Parts, products: GroupedProducts | None, room: DispatchBuffers | None
) -> Tensor | None:
    """What the experts of `module` make of `rows` (rows, features), those of the first expert before those of the
    second, of each by `parts`; in `room` where there is one. `module` has one expert's steps as `rowwise` and its
    parameters' stacks by `names`, or is one of transformers. None where it has to be left to the module."""
    if products is None:
        return None
    if isinstance(rowwise := module.__dict__.get("rowwise"), Rowwise):
        stacks = {name: present(module._parameters[own]) for name, own in module.names.items()}

        def linear(x: Tensor, name: str, is_last: bool) -> Tensor:
            settings = products, parts, False, room if is_last else None
            out: Tensor = _Grouped.apply(*settings, x, stacks[f"{name}.weight"], stacks.get(f"{name}.bias"))  # type: ignore[no-untyped-call]
            return out

        return rowwise(rows, linear) if products.suit(rows, list(stacks.values())) else None
    if not _is_marked(module):
        return None
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = [first, "down_proj", *((f"{first}_bias", "down_proj_bias") if module.has_bias else ())]
    if set(names) != {name for name, one in module._parameters.items() if one is not None}:
        return None
    weights = {name: present(module._parameters[name]) for name in names}
    if not products.suit(rows, list(weights.values())):
        return None

    def layer(x: Tensor, name: str, room: DispatchBuffers | None = None) -> Tensor:
        settings = products, parts, bool(module.is_transposed), room
        out: Tensor = _Grouped.apply(*settings, x, weights[name], weights.get(f"{name}_bias"))  # type: ignore[no-untyped-call]
        return out

    inner = layer(rows, first)
    activation: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
    if not module.has_post_expert_norm:
        return layer(activation(inner), "down_proj", room)
    return cast(Tensor, module.post_expert_norm(layer(activation(inner), "down_proj")))


def _is_marked(module: Any) -> bool:
    marks = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
    return all(isinstance(getattr(module, mark, None), bool) for mark in marks)


class _Grouped(torch.autograd.Function):
    """A linear layer of each expert on its rows. `weights` are (experts, outputs, inputs), the last two exchanged if
    transposed. See [Note: Per-rank expert gradients]."""

    @staticmethod
    def forward(
        ctx: Any,
        products: GroupedProducts,
        parts: Parts,
        is_transposed: bool,
        room: DispatchBuffers | None,
        rows: Tensor,
        weights: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.products, ctx.parts, ctx.is_transposed = products, parts, is_transposed
        of_rows, of_weights = ctx.needs_input_grad[4:6]
        ctx.save_for_backward(rows if of_weights else None, weights if of_rows else None)
        counts = [sum(part) for part in parts]
        count_operations(2 * len(rows) * weights[0].numel())
        weights = weights.transpose(1, 2) if is_transposed else weights
        to = None if room is None else room.rows(len(rows), weights.shape[1], rows.dtype)
        out: Tensor = products.linear(rows, weights, counts, out=to)
        if bias is not None:
            for group, one in zip(torch.split(out, counts), bias, strict=True):
                group += one
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        products, parts = ctx.products, ctx.parts
        grad = grad.contiguous()
        of_rows = of_weights = of_bias = None
        if weights is not None:
            counts = [sum(part) for part in parts]
            of_rows = products.input_grad(grad, weights.transpose(1, 2) if ctx.is_transposed else weights, counts)
        if rows is not None:
            pair = (rows, grad) if ctx.is_transposed else (grad, rows)
            of_weights = products.weight_grad(*pair, parts)
        if ctx.needs_input_grad[6]:
            of_bias = _bias_grad(grad, parts)
        return None, None, None, None, of_rows, of_weights, of_bias


def _bias_grad(grad: Tensor, parts: Parts) -> Tensor:
    out = grad.new_zeros(len(parts), grad.shape[1])
    of_parts = iter(torch.split(grad, [count for each in parts for count in each]))
    for total, each in zip(out, parts, strict=True):
        for _ in each:
            total += next(of_parts).sum(0)
    return out


class _Value(NamedTuple):
    """What an earlier step made."""

    step: int


class _Step(NamedTuple):
    make: Callable[..., Any] | str
    """A function, or the name of a linear layer."""
    args: tuple[Any, ...]
    named: dict[str, Any]


class Rowwise:
    """An expert as steps; made by `of`."""

    def __init__(self, steps: tuple[_Step, ...], result: int) -> None:
        self._steps, self._result = steps, result

    @classmethod
    def from_expert(cls, expert: nn.Module) -> Rowwise | None:
        """Return None for an expert that has more in it than linear layers and functions of single numbers."""
        try:
            graph = fx.Tracer().trace(expert)
        except Exception:  # whatever a forward does that cannot be followed
            return None
        return _read(expert, graph)

    def __call__(self, rows: Tensor, layer: Layer) -> Tensor:
        """What experts make of their `rows` (rows, features)."""
        made: list[Any] = [rows]
        for number, step in enumerate(self._steps, 1):
            args = [made[arg.step] if isinstance(arg, _Value) else arg for arg in step.args]
            if isinstance(step.make, str):
                made.append(layer(args[0], step.make, number == self._result))
            else:
                made.append(step.make(*args, **step.named))
        out: Tensor = made[self._result]
        return out


def _read(expert: nn.Module, graph: fx.Graph) -> Rowwise | None:
    steps: list[_Step] = []
    known: dict[fx.Node, int] = {}
    used: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and not known:
            known[node] = 0
            continue
        if node.op == "output":
            result = node.args[0][0] if isinstance(node.args[0], tuple) and node.args[0] else node.args[0]
            is_whole = bool(used) and used == {name for name, _ in expert.named_parameters()}
            return Rowwise(tuple(steps), known[result]) if is_whole and known.get(result) else None
        if (make := _meaning(expert, node)) is None or not all(map(_is_plain, (*node.args, *node.kwargs.values()))):
            return None
        if isinstance(make, str):
            used |= {f"{make}.{name}" for name, _ in expert.get_submodule(make).named_parameters()}
        if any(isinstance(one, fx.Node) for one in node.kwargs.values()):
            return None
        args = tuple(_Value(known[one]) if isinstance(one, fx.Node) else one for one in node.args)
        steps.append(_Step(make, args, dict(node.kwargs)))
        known[node] = len(steps)
    return None


def _meaning(expert: nn.Module, node: fx.Node) -> Callable[..., Any] | str | None:
    """A step's function, or its linear layer; None for what is not a function of single numbers."""
    target: Any = node.target
    if node.op == "call_module":
        module = expert.get_submodule(target)
        return str(target) if type(module) is nn.Linear else module if type(module) in _MODULES else None
    if target in ("chunk", torch.chunk):
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        return torch.chunk if dim in (-1, 1) else None
    if node.op == "call_method":
        return getattr(Tensor, target) if target in _METHODS else None
    if node.op != "call_function":
        return None
    if target is operator.getitem:
        source = node.args[0]
        is_part = isinstance(source, fx.Node) and source.target in ("chunk", torch.chunk)
        return operator.getitem if is_part and isinstance(node.args[1], int) else None
    return target if target in _FUNCTIONS else None


def _is_plain(argument: Any) -> bool:
    return argument is None or isinstance(argument, (fx.Node, bool, int, float, str))
