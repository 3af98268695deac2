"""Compressed layers of whose weight each tensor rank has a block.

[Note: Compressed layers on tensor ranks]
Masks and scores are those of the whole weight, on every rank, so checkpoints fit any mesh. A rank multiplies its block
with its part of a mask. Groups of a quantised weight are runs of the whole one. Where each group lies on one rank,
nothing is exchanged. Otherwise the ranks gather the weight, quantise it whole, and each takes its block: the values are
those of one rank, to the bit. The largest input of a token is agreed by a maximum, where a rank has some of its
features.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.core.types import ReduceOp
from polyaccel.torch.sharding.tensor_shard import blocks_of, gather_blocks, local_slice, scale_gradient


class CutLayer:
    """The `weight` block of a layer on `ranks`, and its bias's; None for a whole bias. `splits_inputs` says that a rank
    has some features of the input. Making it is collective."""

    def __init__(self, weight: Block, bias: Block | None, ranks: Communicator, *, splits_inputs: bool) -> None:
        self._weight, self._bias, self._ranks = weight, bias, ranks
        self._blocks = blocks_of(weight, ranks)
        self.splits_inputs = splits_inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> CutLayer:
        return self

    def whole(self, value: Tensor) -> Tensor:
        """Return the whole tensor of a block. Collective."""
        return gather_blocks(value, self._blocks, self._ranks)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's block of a whole tensor."""
        return local_slice(whole, self._weight)

    def own_groups(self, groups: int) -> int:
        """Return how many of the `groups` runs of the whole weight this rank has; 0 where ranks share one."""
        length = prod(self._weight.shape) // groups
        has_runs = all(_is_run(block) and block.numel and block.numel % length == 0 for block in self._blocks)
        return self._weight.numel // length if has_runs else 0

    def own_units(self, mask: Tensor, dim: int | None, block: int) -> Tensor:
        """Return this rank's part of a mask of units of `block` slices along `dim`, as a mask of slices.

        Each rank finds a part of its gradient. See [Note: Gradient means over ranks].
        """
        if mask.requires_grad:
            mask = scale_gradient(mask, self._ranks.world_size)
        return self.own(mask) if dim is None else _taken(mask.repeat_interleave(block), self._weight, dim)

    def own_outputs(self, mask: Tensor) -> Tensor:
        """Return this rank's part of a mask of outputs, for its bias."""
        if self._bias is None:
            return mask
        if mask.requires_grad:
            mask = scale_gradient(mask, self._ranks.world_size)
        return _taken(mask, self._bias, 0)

    def largest_input(self, largest_of_part: Tensor) -> Tensor:
        """Return the largest values over all features. Collective where ranks have some of them."""
        if not self.splits_inputs:
            return largest_of_part
        found = largest_of_part.contiguous().clone()
        self._ranks.all_reduce(wrap_torch(found.view(-1)), ReduceOp.MAX, label="ranges of inputs")
        return found


def _is_run(block: Block) -> bool:
    """Whether a block is a run of the flat tensor."""
    first, *others = block.runs
    return len(first) == 1 and all(runs == ((0, size),) for runs, size in zip(others, block.shape[1:], strict=True))


def _taken(units: Tensor, block: Block, dim: int) -> Tensor:
    runs = block.runs[dim]
    parts = [units.narrow(0, start, length) for start, length in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
