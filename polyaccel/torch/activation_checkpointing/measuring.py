"""What a forward pass keeps for its backward, call by call, and what its blocks would cost to compute again.

Bytes are counted where autograd saves a tensor, by the memory that it lies in: memory of several tensors counts once,
parameters and buffers not at all. Costs are estimated from shapes, so that every rank finds the same and nothing
depends on the time of day.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyaccel.errors import ShardingError
from polyaccel.planner.recomputation import BYTES_COST, CallCosts, PassCosts
from polyaccel.torch.profiling.operations import formulas

Memory = dict[StorageWeakRef, int]
"""Pieces of memory and their bytes. The references keep apart what stands at one address at different times."""


class SavedMemory:
    """Counts what autograd saves: `with saved.counting(): ...`. `ignored` is memory that does not count."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        self._ignored: Memory = {}
        for tensor in ignored:
            _add(self._ignored, tensor)

    def counting(self, found: Callable[[], Memory]) -> saved_tensors_hooks:
        """Hooks that add to what `found` gives at the time, over those in force."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            self.add(found(), tensor)
            return outer[0](tensor) if outer else tensor

        def unpack(saved: Any) -> Tensor:
            return outer[1](saved) if outer else saved

        return saved_tensors_hooks(pack, unpack)

    def add(self, found: Memory, tensor: Tensor) -> None:
        """Count the memory of `tensor`."""
        _add(found, tensor, self._ignored)


class PassRecorder:
    """Records one forward pass whose blocks are all recomputed: `with recorder.whole_pass(): ...`, in which each call
    of a block is a `call`. `kept` are the operations whose results might be kept."""

    def __init__(self, module: nn.Module, kept: Collection[Any]) -> None:
        self._saved = SavedMemory([*module.parameters(), *module.buffers()])
        self._kept = kept
        self._outside: list[Memory] = [{}]
        """Kept before each call, and after the last."""
        self._calls: list[_Recorded] = []

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        with self._saved.counting(lambda: self._outside[-1]):
            yield

    @contextmanager
    def call(self, name: str, inputs: Sequence[Any]) -> Iterator[None]:
        """A block runs for the first time; whatever it is given stays anyhow."""
        for leaf in tree_leaves(list(inputs)):
            if isinstance(leaf, Tensor):
                self._saved.add(self._outside[-1], leaf)
        self._outside.append({})
        recorded = _Recorded(name, {}, _Operations(self._kept, self._saved))
        self._calls.append(recorded)
        with recorded.operations, self._saved.counting(lambda: recorded.saved):
            yield

    def costs(self) -> PassCosts:
        """The costs of the pass."""
        users = Counter(memory for call in self._calls for memory in call.saved)
        outside: set[StorageWeakRef] = set()
        befores, everywhere = [], {memory for found in self._outside for memory in found}
        for at, found in enumerate(self._outside):
            shared = self._calls[at].saved if at < len(self._calls) else {}
            # What several calls keep is there as soon as one of them keeps it, whatever the others do.
            fixed = {**found, **{memory: nbytes for memory, nbytes in shared.items() if users[memory] > 1}}
            befores.append(sum(nbytes for memory, nbytes in fixed.items() if memory not in outside))
            outside |= fixed.keys()
        everywhere |= outside
        calls = []
        for call, before in zip(self._calls, befores, strict=False):
            own = {memory: nbytes for memory, nbytes in call.saved.items() if memory not in everywhere}
            results = {memory: nbytes for memory, nbytes in call.operations.results.items() if memory not in everywhere}
            calls.append(
                CallCosts(
                    name=call.name,
                    before_nbytes=before,
                    nbytes=sum(own.values()),
                    cost=call.operations.cost,
                    operations_nbytes=sum(results.values()),
                    extra_nbytes=sum(nbytes for memory, nbytes in results.items() if memory not in own),
                    operations_cost=call.operations.kept_cost,
                )
            )
        return PassCosts(tuple(calls), befores[-1])


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the costs of the operations that run inside, and the results of those in `kept`."""

    def __init__(self, kept: Collection[Any], saved: SavedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = 0.0
        self.kept_cost = 0.0
        self.results: Memory = {}
        self._kept = kept
        self._saved = saved
        self._formulas = formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not getattr(func, "is_view", False) and packet is not torch.ops.aten.detach:
            read = (leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
            cost = BYTES_COST * float(sum(leaf.numel() * leaf.element_size() for leaf in (*read, *results)))
            if (formula := self._formulas.get(packet)) is not None:
                cost += float(formula(*args, **kwargs, out_val=out))
            self.cost += cost
            if packet in self._kept:
                self.kept_cost += cost
                for result in results:
                    self._saved.add(self.results, result)
        return out


class _Recorded:
    """One call of a block: what it saved, and its operations."""

    def __init__(self, name: str, saved: Memory, operations: _Operations) -> None:
        self.name = name
        self.saved = saved
        self.operations = operations


def _add(found: Memory, tensor: Tensor, ignored: Memory | None = None) -> None:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ShardingError):  # sparse, inside a transform, or sharded
        return
    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    if ignored is None or reference not in ignored:
        found[reference] = storage.nbytes()
