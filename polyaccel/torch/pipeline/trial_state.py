"""What a trial pass changes of a model, undone, and which parameters it reads without a gradient: `unchanged`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_OWN_OF_MODULES = frozenset(vars(nn.Module())) | {"forward"}


@contextmanager
def unchanged(model: nn.Module, reach: Callable[[], range]) -> Iterator[list[tuple[Tensor, range]]]:
    """Give the modules of `model` their attributes back, and parameters and buffers the values that were changed in
    place: RWKV scales its layers when it begins to evaluate.

    Args:
        model: Its parameters are those of the trial.
        reach: Gives the parts that may use a value computed now.

    Yields:
        The parameters read without a gradient so far, and the parts that may use what was read.
    """
    before = [(module, _attributes(module)) for module in model.modules()]
    watch = _Watch([*model.parameters()], [*model.buffers()], reach)
    try:
        with watch:
            yield watch.hidden
    finally:
        for module, attributes in before:
            for name in _attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        watch.undo()


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN_OF_MODULES}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps values before an operation changes them in place, and notes reads that autograd does not see."""

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], reach: Callable[[], range]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {_memory(one): one for one in parameters}
        self._tensors = {_memory(one): one for one in buffers} | self._parameters
        self._reach = reach
        self._before: dict[int, Tensor] = {}
        self.hidden: list[tuple[Tensor, range]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = function._schema
        gives_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        for argument, value in zip(schema.arguments, args, strict=False):
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, Tensor) and (memory := _memory(one)) in self._tensors:
                    if argument.is_write:
                        self._before.setdefault(memory, self._tensors[memory].detach().clone())
                    elif memory in self._parameters and not gives_view and not _has_gradient(one):
                        self.hidden.append((self._parameters[memory], self._reach()))
        return function(*args, **(kwargs or {}))

    @torch.no_grad()
    def undo(self) -> None:
        for memory, values in self._before.items():
            self._tensors[memory].copy_(values)


def _has_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
