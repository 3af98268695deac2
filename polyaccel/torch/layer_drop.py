"""Blocks of a model that are skipped at random in training: stochastic depth, whose share falls with the steps.

Huang et al. 2016 (arXiv 1603.09382), progressively as Zhang and He 2020 (arXiv 2010.13369, section 4.2). Of a list of
L blocks, block i (from 1) is kept with the probability p = 1 - (1 - theta) i / L. A block that is skipped gives its
hidden states on. What a kept block adds to them counts 1 / p times, so that its expectation is what evaluation has.

[Note: Draws of skipped blocks]
A draw follows from the seed, the number of the micro-batch and the block. So all ranks skip the same blocks, a region
that is computed again does what it did, and a checkpoint continues with the draws that would have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.engine.policies.step_inputs import LayerDrop
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.activation_checkpointing.block_calls import BlockForward, ChangedModule
from polyaccel.torch.sharding.units import find_blocks

_KEY = "progressive_layer_drop"
_THETA = "pld_theta"
_HIDDEN = "hidden_states"
_PRIME = 1_000_003


class DroppedBlocks:
    """The blocks of `model`, skipped by `policy`; `done` gives the finished steps and micro-batches.

    Raises ConfigError for a model in which no blocks are found.
    """

    joins_graphs = False
    compile_options: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __init__(self, model: nn.Module, policy: LayerDrop, done: Callable[[], tuple[int, int]]) -> None:
        self._policy, self._done = policy, done
        self._blocks = find_blocks(model)
        if not self._blocks:
            expected, hint = "the model has no list of blocks", "let its forward take pld_theta, and skip layers itself"
            raise ConfigError([Problem(f"{_KEY}.enabled", True, expected, hint)])
        lists = Counter(name.rpartition(".")[0] for name in self._blocks)
        seen: Counter[str] = Counter()
        self._depth: dict[str, float] = {}
        """i / L of each block."""
        self._numbers = {name: number for number, name in enumerate(self._blocks)}
        for name in self._blocks:
            seen[name.rpartition(".")[0]] += 1
            self._depth[name] = seen[name.rpartition(".")[0]] / lists[name.rpartition(".")[0]]
        self._outputs: dict[str, type] = {}
        """What each block returns, once it has run."""
        self._installed = [_DroppedBlock(self, name, block) for name, block in self._blocks.items()]

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the blocks."""
        return tuple(self._blocks)

    def keeps(self, name: str) -> tuple[bool, float]:
        """Return whether block `name` is kept in the micro-batch under way, and its probability."""
        steps, micro_batches = self._done()
        share = 1.0 - (1.0 - self._policy.at(steps)) * self._depth[name]
        seed = (self._policy.seed * _PRIME + micro_batches) * _PRIME + self._numbers[name]
        drawn = torch.rand((), generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64)
        return float(drawn) < share, share

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        named: dict[str, Any],
        *,
        is_observed: bool = False,
    ) -> Any:
        """Call the block `name`, whose forward is `function`, or skip it."""
        if not self._blocks[name].training:
            return function(*args, **named)
        is_kept, share = self.keeps(name)
        if share >= 1.0:
            return self._remembered(name, function(*args, **named))
        hidden = args[0] if args else named.get(_HIDDEN)
        if not isinstance(hidden, Tensor):
            given = type(hidden).__name__
            hint = "let the block take its hidden states first, or as hidden_states"
            raise PolyaccelError(f"a block that takes a {given} cannot be skipped", hint=hint, value=given)
        if is_kept:
            before = _version(hidden)
            output = self._remembered(name, function(*args, **named))
            if _version(hidden) != before:  # what it added cannot be separated from what was there
                hint = "write hidden = hidden + update in the block, not hidden += update"
                raise PolyaccelError("a block that writes to its input cannot be skipped", hint=hint, value=name)
            return _changed(output, lambda one: _scaled(hidden, one, share))
        kind = self._outputs.get(name) or self._learn(name, function, args, named, hidden)
        return hidden if kind is Tensor else kind([hidden])

    def _remembered(self, name: str, output: Any) -> Any:
        """`output`, whose kind is kept. Raises PolyaccelError where it has more than hidden states."""
        kind: type = Tensor if isinstance(output, Tensor) else type(output)
        self._outputs[name] = kind
        if kind is not Tensor and (kind not in (tuple, list) or len(output) != 1 or not isinstance(output[0], Tensor)):
            given = [type(one).__name__ for one in output] if isinstance(output, (tuple, list)) else kind.__name__
            hint = "let blocks return hidden states alone: without caches, attention weights and router logits"
            raise PolyaccelError(f"a block that returns {given} cannot be skipped", hint=hint, value=given)
        return output

    def _learn(self, name: str, function: Callable[..., Any], args: Any, named: dict[str, Any], hidden: Tensor) -> type:
        """Run a block to see what it returns; that is rare: a checkpoint was loaded, and the block is skipped first."""
        kind = hidden.device.type
        forked: dict[str, Any] = {"devices": []} if kind == "cpu" else {"devices": [hidden.device], "device_type": kind}
        block = self._blocks[name]
        with torch.no_grad(), torch.random.fork_rng(**forked):
            block.eval()
            try:
                self._remembered(name, function(*args, **named))
            finally:
                block.train()
        return self._outputs[name]

    def release(self) -> None:
        """Give the blocks back as they were."""
        for installed in self._installed:
            installed.release()
        self._installed.clear()


class _DroppedBlock(ChangedModule):
    def __init__(self, blocks: DroppedBlocks, name: str, block: nn.Module) -> None:
        super().__init__(block)
        self._set("forward", BlockForward(blocks, name, block, block.forward))


def drops_itself(model: nn.Module) -> bool:
    """Whether the model skips layers itself: a forward names `pld_theta`, or its own takes any name.

    Models of transformers take any name, and read none of them.
    """
    kinds = {type(part) for part in model.modules()}
    if any(_THETA in _parameters(kind) for kind in kinds):
        return True
    takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in _parameters(type(model)).values())
    return takes_all and not any(kind.__module__.startswith("transformers.") for kind in kinds)


def _parameters(kind: type[nn.Module]) -> Any:
    try:
        return signature(kind.forward).parameters
    except (TypeError, ValueError):  # built in C
        return {}


def _changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(output) if isinstance(output, Tensor) else type(output)([change(output[0])])


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to, as far as torch counts."""
    return 0 if tensor.is_inference() else tensor._version


def _scaled(hidden: Tensor, output: Tensor, share: float) -> Tensor:
    """Hidden states with what a block has added to them, 1 / `share` times."""
    if hidden.shape != output.shape:
        shapes = f"{tuple(hidden.shape)} to {tuple(output.shape)}"
        hint = "leave progressive_layer_drop out, or let the model's forward take pld_theta"
        raise PolyaccelError(f"a block from {shapes} cannot be skipped", hint=hint, value=shapes)
    return hidden + (output - hidden) / share
