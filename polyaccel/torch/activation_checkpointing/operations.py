"""Operations whose results are kept although what is around them is recomputed.

Torch's own contexts for this (`create_selective_checkpoint_contexts`) want every operation of the second run to have
been in the first one. It need not: autocast casts a weight once for several blocks, and each block again when it is
recomputed; a cache may be longer. So these here look at the kept operations alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from polyaccel.errors import ConfigError, PolyaccelError, Problem

KEY = "activation_checkpointing.keep"
_GROUPS = {
    "matmul": "aten.mm aten.addmm aten.bmm aten.baddbmm aten.convolution aten._scaled_mm polyaccel.linear",
    "attention": "aten._scaled_dot_product_flash_attention aten._scaled_dot_product_efficient_attention "
    "aten._scaled_dot_product_cudnn_attention aten._scaled_dot_product_flash_attention_for_cpu "
    "aten._scaled_dot_product_fused_attention_overrideable",
}
DEFAULT = ("matmul", "attention")
"""What takes most of the time, and is worth keeping where there is memory for it."""


def kept_operations(names: Iterable[str]) -> frozenset[Any]:
    """The operations (torch's overload packets) that `names` mean. Raises ConfigError for a name that means none."""
    found: set[Any] = set()
    for name in names:
        members = _GROUPS.get(name, name).split()
        packets = [packet for member in members if (packet := _packet(member)) is not None]
        if name not in _GROUPS and not packets:
            hint = f"use {', '.join(_GROUPS)}, or a name like aten.mm"
            raise ConfigError([Problem(KEY, name, "is not an operation of torch", hint)])
        found.update(packets)
    return frozenset(found)


def contexts_for(kept: frozenset[Any]) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
    """What makes the contexts of a region that keeps the results of `kept`: for its run, and for running it again."""

    def make() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        results: dict[Any, list[Any]] = defaultdict(list)
        return _Keeping(kept, results), _Kept(kept, results)

    return make


class _Result:
    """A kept result. It shares memory and version with what the region continued with, and has no graph."""

    def __init__(self, tensor: Tensor) -> None:
        # Without this key, which is excluded inside of dispatch modes, the two would have separate versions.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor = tensor.detach()
        self._version = self._tensor._version

    def tensor(self, operation: Any) -> Tensor:
        if self._tensor._version != self._version:
            raise PolyaccelError(
                f"the result of {operation} was changed in place after it was kept for the backward pass",
                hint=f"leave the operation out of {KEY}, or do not change its result in place",
                value=str(operation),
            )
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return self._tensor.detach()


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first run: results of kept operations go into `results`, by operation, in order."""

    def __init__(self, kept: frozenset[Any], results: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "_overloadpacket", func) in self._kept:
            self._results[func].append(tree_map_only(Tensor, _Result, out))
        return out


class _Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A later run, whose kept operations have the results of the first."""

    def __init__(self, kept: frozenset[Any], results: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._results = results
        self._counts: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._counts.clear()  # a graph may be walked twice
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "_overloadpacket", func) not in self._kept:
            return func(*args, **(kwargs or {}))
        at = self._counts[func]
        self._counts[func] += 1
        if at >= len(self._results[func]):
            raise PolyaccelError(
                f"{func} ran more often when its block was computed again",
                hint="a block that is recomputed must do the same both times; leave it out of "
                "activation_checkpointing.blocks",
                value=str(func),
            )
        return tree_map_only(_Result, lambda result: result.tensor(func), self._results[func][at])


def _packet(name: str) -> Any:
    space, _, operation = name.partition(".")
    try:
        return getattr(getattr(torch.ops, space), operation.partition(".")[0]) if operation else None
    except AttributeError:
        return None
