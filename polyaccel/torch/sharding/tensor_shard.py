"""Which block of a global tensor a parameter is, where a module was cut over ranks.

A module that holds a part of what the whole model has declares it in an attribute `parallel_cuts`: a `TensorShard` for
each of its own parameters that is a block. Its other parameters are whole, and equal on all ranks. The names of
parameters are those of the model before it was cut, so that checkpoints of both have the same names.

[Note: Gradient means over ranks]
Whatever a mesh has for axes, the engine takes the mean of a parameter's gradients over all ranks that hold the same
elements of it, and nothing else. So code that cuts a module has to make sure that each rank hands over the whole
gradient of its own loss: a sum over ranks that compute parts of one loss belongs into the module's backward pass. Where
ranks that hold the same elements have parts of a gradient, the module multiplies each part with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block, Run
from polyaccel.core.types import ParamSpec


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The `block` of the global tensor that this rank holds; along the mesh `axes` other ranks hold other blocks."""

    block: Block
    axes: tuple[str, ...] = ("tensor",)


class Blocks:
    """The parameters of a model, by full name, as blocks of whole tensors. `along` gives the communicator of the ranks
    along axes of the mesh."""

    def __init__(
        self, specs: Mapping[str, ParamSpec], along: Callable[[Collection[str]], Communicator] | None = None
    ) -> None:
        self._specs = specs
        self._along = along

    def is_cut(self, fqn: str) -> bool:
        """Whether ranks along some axis of the mesh hold other blocks of a parameter."""
        return self._specs[fqn].block is not None

    def global_shape(self, fqn: str) -> tuple[int, ...]:
        """The shape of the tensor that a parameter is, or is a block of."""
        return self._specs[fqn].global_shape

    def block_of(self, fqn: str, whole: Tensor) -> Tensor:
        """This rank's block of a parameter whose whole tensor is `whole`."""
        block = self._specs[fqn].block
        return whole if block is None else local_slice(whole, block)

    def gather_full(self, fqn: str, value: Tensor) -> Tensor:
        """The whole tensor of a parameter of which `value` is this rank's block. Collective where it is cut."""
        spec = self._specs[fqn]
        if spec.block is None or self._along is None:
            return value
        return gather_full(value, spec.block, self._along(spec.cut))


def local_slice(whole: Tensor, block: Block) -> Tensor:
    """The block of `whole`, in separate memory."""
    for dim, runs in enumerate(block.runs):
        if runs != ((0, block.shape[dim]),):
            parts = [whole.narrow(dim, start, length) for start, length in runs]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole.clone(memory_format=torch.contiguous_format)


def gather_full(value: Tensor, block: Block, ranks: Communicator) -> Tensor:
    """The whole tensor, of which each of `ranks` has the `value` of a block, on all of them. Collective."""
    return gather_blocks(value, blocks_of(block, ranks), ranks)


def blocks_of(block: Block, ranks: Communicator) -> list[Block]:
    """The blocks of one tensor that `ranks` have, of which `block` is this rank's. Collective."""
    return [Block(tuple(shape), _tuples(runs)) for shape, runs in ranks.all_gather_object([block.shape, block.runs])]


def gather_blocks(value: Tensor, blocks: Sequence[Block], ranks: Communicator) -> Tensor:
    """The whole tensor, of which rank r of `ranks` has `blocks[r]`, and this one its `value`. Collective."""
    longest = max(each.numel for each in blocks)
    own, parts = value.new_zeros(longest), value.new_empty(longest * len(blocks))
    own[: value.numel()] = value.reshape(-1)
    ranks.all_gather(wrap_torch(parts), wrap_torch(own), label="blocks of a tensor")
    whole = value.new_zeros(blocks[0].shape)
    for rank, each in enumerate(blocks):
        part = parts[rank * longest :][: each.numel].view(each.local_shape)
        for box in each.boxes(0, each.numel):
            here = part.as_strided(box.lengths, box.strides, part.storage_offset() + box.offset)
            there = whole
            for dim, (start, length) in enumerate(zip(box.corner, box.lengths, strict=True)):
                there = there.narrow(dim, start, length)
            there.copy_(here)
    return whole


def _tuples(runs: Any) -> tuple[tuple[Run, ...], ...]:
    return tuple(tuple((start, length) for start, length in run) for run in runs)


def cuts_of(module: nn.Module) -> dict[nn.Parameter, TensorShard]:
    """The parameters of `module` that are blocks of global tensors."""
    found: dict[nn.Parameter, TensorShard] = {}
    for part in module.modules():
        cuts: Mapping[str, TensorShard] = getattr(part, "parallel_cuts", None) or {}
        for name, cut in cuts.items():
            parameter = part._parameters.get(name)
            if parameter is not None:
                found[parameter] = cut
    return found


def scale_gradient(value: Tensor, factor: int) -> Tensor:
    """Return `value` with a gradient times `factor`: so many ranks find parts of it, and the engine takes a mean."""
    return _ScaledGradient.apply(value, factor)  # type: ignore[no-untyped-call, no-any-return]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
