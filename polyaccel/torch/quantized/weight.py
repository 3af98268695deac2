"""`QuantizedWeight`: what a quantised layer shows under the name of its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from polyaccel.errors import PolyaccelError


class QuantizedWeight(Tensor):
    """A matrix that is computed when an operation needs its values, and that cannot be written to.

    Its shape, type and device are known without: PEFT and others ask for these, while codes are sharded too.
    """

    _values: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, values: Callable[[], Tensor]
    ) -> QuantizedWeight:
        self: QuantizedWeight = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        self._values = values
        return self

    @property
    def data(self) -> Tensor:
        """The matrix, in separate memory."""
        return self._values().clone()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise _not_written("data")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise _not_written(func._schema.name)
        args, named = tree_map(lambda leaf: leaf._values() if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        return func(*args, **named)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _not_written(what: str) -> PolyaccelError:
    return PolyaccelError(
        f"a quantised weight was written to: {what}",
        hint="leave adapters unmerged, or call polyaccel.dequantize_frozen(model) first",
        value=what,
    )
