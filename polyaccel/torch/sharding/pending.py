"""A parameter while the gather of its updated values is under way: the first use of it waits for them.

[Note: Pending parameter values]
With `overlap_param_gather` a step returns before the other ranks' slices are here. Until the first use, a parameter's
class is `PendingParameter`, so that the first operation on it, wherever that stands, waits for its bucket. Hooks on
modules would not do: `nn.MultiheadAttention` reads its output projection's weight without calling that module, and so
does `state_dict` on the module, or a function that uses a weight. Waiting is local, because the collective was launched
by all ranks before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from polyaccel.torch.sharding.gradients import ShowsGradient
from polyaccel.torch.sharding.sharded import NEEDS_NO_VALUES

_WAIT = "_polyaccel_wait"
_CLASS = "_polyaccel_class"


class PendingParameter(ShowsGradient, nn.Parameter):
    """The class of a parameter until its values are waited for. See [Note: Pending parameter values]."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NEEDS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is PendingParameter:
                _await(leaf)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_await(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _await(self).__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _await(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def expect(parameter: nn.Parameter, wait: Callable[[], None]) -> None:
    """Let the first use of `parameter` call `wait`."""
    if type(parameter) is not PendingParameter:
        setattr(parameter, _CLASS, type(parameter))
        parameter.__class__ = PendingParameter
    setattr(parameter, _WAIT, wait)


def _await(parameter: nn.Parameter) -> nn.Parameter:
    wait: Callable[[], None] = getattr(parameter, _WAIT)
    parameter.__class__ = getattr(parameter, _CLASS)
    delattr(parameter, _WAIT)
    delattr(parameter, _CLASS)
    wait()
    return parameter
