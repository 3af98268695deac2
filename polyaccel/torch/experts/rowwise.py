"""Experts that are linear layers and functions of single numbers: what one makes of a row depends on that row alone, so
that all rows of all experts may go through it together, if each linear layer takes every expert's own weights."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

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


class _Value(NamedTuple):
    """What an earlier step made."""

    step: int


class _Step(NamedTuple):
    make: Callable[..., Any] | str
    """A function, or the name of a linear layer."""
    args: tuple[Any, ...]
    named: dict[str, Any]


Layer = Callable[[Tensor, str, bool], Tensor]
"""What a linear layer makes of rows: these, its name, and whether its outputs are the expert's."""


class Rowwise:
    """An expert as steps; made by `of`."""

    def __init__(self, steps: tuple[_Step, ...], result: int) -> None:
        self._steps, self._result = steps, result

    @classmethod
    def of(cls, expert: nn.Module) -> Rowwise | None:
        """None for an expert that has anything else in it than linear layers and functions of single numbers."""
        try:
            graph = fx.Tracer().trace(expert)
        except Exception:  # whatever a forward does that cannot be followed
            return None
        return _read(expert, graph)

    def __call__(self, rows: Tensor, layer: Layer) -> Tensor:
        """What experts make of their `rows` (rows, features)."""
        made: list[Any] = [rows]
        for number, step in enumerate(self._steps, 1):
            args = [made[one.step] if isinstance(one, _Value) else one for one in step.args]
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
