"""The linear layers of a model that multiply in 8 or 4 bits."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.low_precision.products import LowPrecision
from polyaccel.torch.sharding.pending import PendingParameter
from polyaccel.torch.sharding.sharded import ShardedParameter

_ABSENT = (ShardedParameter, PendingParameter)


class LowPrecisionForward:
    """`forward` of one layer. A copy of the layer gets the ordinary one, and so does an unpickled layer."""

    def __init__(self, layer: Any, how: LowPrecision) -> None:
        self.layer, self.how = layer, how
        self._is_transposed = not isinstance(layer, nn.Linear)

    @outside_graphs
    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear's has
        weight, bias = self.layer.weight, self.layer.bias
        for parameter in (weight, bias):
            if type(parameter) in _ABSENT:
                Tensor.detach(parameter)  # has its values brought here, after which it is an ordinary one
        return self.how.apply(input, weight.t() if self._is_transposed else weight, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer))
        return self if copy is None else types.MethodType(type(self.layer).forward, copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.layer, "forward")  # whose attributes are not there yet when this is called


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether it is torch's linear layer or transformers' Conv1D, with a forward that no one has replaced."""
    kind = type(layer)
    is_known = kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."))
    return is_known and "forward" not in layer.__dict__


def matching(layers: Iterable[tuple[str, nn.Module]], modules: Iterable[str], excluded: Iterable[str]) -> Iterator[str]:
    """Yield the names that an expression of `modules` finds, and none of `excluded`."""
    wanted, left_out = list(modules), list(excluded)
    for name, _ in layers:
        is_wanted = any(one == "*" or re.search(one, name) for one in wanted)
        if is_wanted and not any(re.search(one, name) for one in left_out):
            yield name


def release(layer: nn.Module) -> None:
    """Give a layer its own forward again."""
    if isinstance(layer.__dict__.get("forward"), LowPrecisionForward):
        del layer.__dict__["forward"]
