"""What a verification learns from forward passes: the order of modules, and the gradients that reach the inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class ForwardOrder:
    """The order in which the modules of `module` end their first forward pass: parts before the whole."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._ended: dict[str, nn.Module] = {}
        self._handles = [one.register_forward_hook(partial(self._note, name)) for name, one in module.named_modules()]

    def _note(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module.training:
            self._ended.setdefault(name, module)

    def take(self) -> list[str]:
        """Stop, and return parameters and buffers by full name: those of modules that were not called come last."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        called = [
            f"{name}.{own}" if name else own
            for name, module in self._ended.items()
            for own in (*module._parameters, *module._buffers)
        ]
        everything = (*self._module.named_parameters(), *self._module.named_buffers())
        return list(dict.fromkeys([*called, *(name for name, _ in everything)]))


class InputGradients:
    """The gradients that reach the inputs of `engine` in each micro-batch.

    That is the first tensor that a script gives, where it is floating, and each that the script itself differentiates.
    Where the first one has words, it is the output of embeddings in `module`. Other floating tensors are masks and
    targets, whose gradients kernels need not compute.
    """

    def __init__(self, engine: nn.Module, module: nn.Module) -> None:
        self._passes = 0
        self._counts: Counter[str] = Counter()
        self._found: dict[str, Tensor] = {}
        self._handles = [engine.register_forward_pre_hook(self._watch_inputs, with_kwargs=True)]
        for name, one in module.named_modules():
            if isinstance(one, nn.Embedding):
                self._handles.append(one.register_forward_hook(partial(self._watch_output, name)))

    def _watch_inputs(self, engine: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not engine.training or not torch.is_grad_enabled():
            return None
        leaves, tree = tree_flatten((args, kwargs))
        first = next((index for index, one in enumerate(leaves) if isinstance(one, Tensor)), None)
        for index, one in enumerate(leaves):
            if not isinstance(one, Tensor) or not one.is_floating_point():
                continue
            name = f"input {index} of pass {self._passes}"
            if one.requires_grad:
                one.register_hook(partial(self._add, name))  # type: ignore[no-untyped-call]
            elif index == first and type(one) is Tensor and not one.is_inference():
                leaf = one.detach().requires_grad_()
                leaf.register_hook(partial(self._add, name))  # type: ignore[no-untyped-call]
                leaves[index] = leaf.clone()  # which a model may change in place
        self._passes += 1
        return tree_unflatten(leaves, tree)

    def _watch_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and module.training:
            called = f"output of {name} {self._counts[name]}"
            output.register_hook(partial(self._add, called))  # type: ignore[no-untyped-call]
            self._counts[name] += 1

    def _add(self, name: str, gradient: Tensor) -> None:
        gradient = gradient.detach()
        self._found[name] = self._found[name] + gradient if name in self._found else gradient.clone()

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of this step, and begin the next."""
        yield from self._found.items()
        self._passes = 0
        self._counts.clear()
        self._found.clear()

    def close(self) -> None:
        """Watch no more passes."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._found.clear()
