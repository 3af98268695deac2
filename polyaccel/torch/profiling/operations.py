"""The floating-point operations of torch's ops: torch's own formulas, and those of ops that it has none for."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _linear(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """A product by oneDNN, of shapes."""
    return int(2 * prod(x) * weight[0])


def _with_shapes(formula: Any) -> Any:
    """`formula` of shapes as a formula of tensors, as torch keeps its own."""

    def of_tensors(*args: Any, out_val: Any = None, **named: Any) -> int:
        shapes = [each.shape if isinstance(each, torch.Tensor) else each for each in args]
        return int(formula(*shapes, **named))

    return of_tensors


def formulas() -> Mapping[Any, Any]:
    """Formula by op, each called with the op's arguments and `out_val`."""
    more: dict[Any, Any] = {}
    for name, same in (
        ("_scaled_dot_product_flash_attention_for_cpu", _aten._scaled_dot_product_flash_attention),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            _aten._scaled_dot_product_flash_attention_backward,
        ),
    ):
        if hasattr(_aten, name):
            more[getattr(_aten, name)] = flop_registry[same]
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        more[torch.ops.mkldnn._linear_pointwise] = _with_shapes(_linear)
    return {**more, **flop_registry}


_counting: list[CountingMode] = []


def count_operations(operations: int) -> None:
    """Tell those who count of operations that torch's dispatcher does not see, because they are no op of torch's."""
    for each in _counting:
        each.total += operations


class CountingMode(TorchDispatchMode):
    """Counts the operations of what runs inside, in `total`, and what `count_operations` is told meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._formulas = formulas()

    def __enter__(self) -> CountingMode:
        _counting.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _counting.remove(self)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out
