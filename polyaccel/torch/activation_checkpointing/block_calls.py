"""What calls the blocks of a model, or is called in their place: each call becomes one of `BlockRunner.run`.

[Note: Recomputation in compiled graphs]
In a graph of `torch.compile` blocks are recomputed by torch's own checkpoint, which the compiler plans. It restores
nothing but random numbers of torch's: a block that changes a buffer would change it twice. So blocks run between the
graphs first, and join them when two runs in a row of each have changed nothing. Blocks with collectives, where graphs
end, never do. Between the graphs a block is compiled by itself if `engine.compile` was called: both of its runs are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn


class BlockRunner(Protocol):
    """Runs blocks. A protocol, because `RecomputedBlocks` installs what calls it."""

    joins_graphs: bool
    """Whether compiled graphs contain the blocks. See [Note: Recomputation in compiled graphs]."""
    compile_options: tuple[tuple[Any, ...], dict[str, Any]] | None
    """Arguments of `torch.compile`; None where the engine has compiled nothing."""

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        named: dict[str, Any],
        *,
        is_observed: bool = False,
    ) -> Any:
        """Call the block `name`, whose forward is `function`; `is_observed`: between compiled graphs."""
        ...


def _run_traced(
    run: Callable[..., Any], blocks: BlockRunner, function: Callable[..., Any], args: Any, named: dict[str, Any]
) -> Any:
    """Call a block's `function` in the graph that is traced, or `run` between two graphs.

    The block's name stays out of it: a graph for each name would be compiled.
    """
    if not torch.is_grad_enabled():
        return function(*args, **named)
    if blocks.joins_graphs:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **named)
    from polyaccel.torch.run_outside_graph import run_outside_graph

    return run_outside_graph(run, *args, **named)


class BlockForward:
    """What stands for the forward of one block, or recomputes it. A copy of the block gets the ordinary one, and so
    does an unpickled block."""

    def __init__(self, blocks: BlockRunner, name: str, block: nn.Module, original: Any) -> None:
        self._blocks = blocks
        self._name = name
        self.block = block
        self._original = original
        self._compiled: Any = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():  # a second run would fill a cache of keys once more
            args = tuple(None if _is_empty_cache(one) else one for one in args)
            named = {name: None if _is_empty_cache(one) else one for name, one in named.items()}
        if torch.compiler.is_compiling():
            return _run_traced(self._run, self._blocks, self._original, args, named)
        return self._blocks.run(self._name, self._original, args, named)

    def _run(self, *args: Any, **named: Any) -> Any:
        options = self._blocks.compile_options
        if self._compiled is None and options is not None:
            self._compiled = torch.compile(self._original, *options[0], **options[1])
        function = self._original if self._compiled is None else self._compiled
        return self._blocks.run(self._name, function, args, named, is_observed=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.block))
        return self if copy is None else types.MethodType(type(self.block).forward, copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.block, "forward")  # whose attributes are not there yet when this is called


class BlockFunction:
    """What a layer of Hugging Face's is given to run itself by. A copy of the layer runs as it is."""

    def __init__(self, blocks: BlockRunner, name: str) -> None:
        self._blocks = blocks
        self._name = name
        self._compiled: tuple[Any, Any] = (None, None)
        """The layer's function, and the same compiled."""

    def __call__(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return _run_traced(partial(self._run, function), self._blocks, function, args, named)
        return self._blocks.run(self._name, function, args, named)

    def _run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        options = self._blocks.compile_options
        if options is not None and isinstance(function, partial):  # a new one in each call, of the same function
            if self._compiled[0] is not function.func:
                self._compiled = function.func, torch.compile(function.func, *options[0], **options[1])
            function = partial(self._compiled[1], *function.args, **function.keywords)
        return self._blocks.run(self._name, function, args, named, is_observed=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return run_plainly

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_runner, ()


def run_plainly(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`function(*args, **named)`, and nothing else."""
    return function(*args, **named)


def _plain_runner() -> Callable[..., Any]:
    return run_plainly


class ChangedModule:
    """A module with other attributes than before."""

    def __init__(self, module: nn.Module) -> None:
        self._block = module
        self._before: dict[str, Any] = {}

    def release(self) -> None:
        """As before."""
        for name, value in self._before.items():
            if value is _ABSENT:
                self._block.__dict__.pop(name, None)
            else:
                self._block.__dict__[name] = value

    def _set(self, name: str, value: Any) -> None:
        self._before[name] = self._block.__dict__.get(name, _ABSENT)
        self._block.__dict__[name] = value


class RecomputedBlock(ChangedModule):
    """A block that is recomputed. See [Note: Recomputation inside hooks]."""

    def __init__(self, blocks: BlockRunner, name: str, block: nn.Module) -> None:
        super().__init__(block)
        if _recomputes_itself(block):
            self._set("gradient_checkpointing", True)
            self._set("_gradient_checkpointing_func", BlockFunction(blocks, name))
        else:
            self._set("forward", BlockForward(blocks, name, block, block.forward))


class ModelOfBlocks(ChangedModule):
    """A model whose layers are recomputed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._set("gradient_checkpointing", True)
        self._set("_gradient_checkpointing_func", run_plainly)


_ABSENT = object()


def _recomputes_itself(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _is_empty_cache(value: Any) -> bool:
    """Whether `value` is a cache of Hugging Face's without keys."""
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__) and not value.get_seq_length()


def models_around(module: nn.Module, blocks: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The models of Hugging Face's around blocks that recompute themselves."""
    own = [name for name, block in blocks.items() if _recomputes_itself(block)]
    return [
        part
        for name, part in module.named_modules()
        if hasattr(part, "gradient_checkpointing")
        and name not in blocks
        and any(not name or block.startswith(f"{name}.") for block in own)
    ]
