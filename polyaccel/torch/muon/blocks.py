"""Matrices of which tensor ranks have blocks: gathered on one of these ranks each, orthogonalised, and cut again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.core.types import ParamSpec
from polyaccel.torch.muon.matrices import cuts_matrices

Along = Callable[[Collection[str]], Communicator]
"""Gives the ranks along axes of the mesh."""


class TensorBlocks:
    """The blocks that ranks `along` the axes of a cut have of parameters. Collective among all ranks: every rank passes
    the same parameters of trained matrices."""

    def __init__(self, specs: Iterable[ParamSpec], heads: Mapping[str, int], along: Along) -> None:
        by_cut: dict[tuple[str, ...], list[ParamSpec]] = {}
        for spec in sorted(specs, key=lambda one: one.fqn):
            if spec.block is not None and spec.cut:
                by_cut.setdefault(spec.cut, []).append(spec)
        self._groups = {cut: along(cut) for cut in sorted(by_cut)}
        self._blocks: dict[str, list[Block]] = {}
        for cut, found in sorted(by_cut.items()):
            own = [(one.block.shape, one.block.runs) for one in found if one.block is not None]
            for theirs in self._groups[cut].all_gather_object(own):
                for spec, (shape, runs) in zip(found, theirs, strict=True):
                    block = Block(tuple(shape), tuple(tuple((at, count) for at, count in each) for each in runs))
                    self._blocks.setdefault(spec.fqn, []).append(block)
        self.names = {
            fqn
            for fqn, blocks in self._blocks.items()
            if any(cuts_matrices(block, heads.get(fqn, 0)) for block in blocks)
        }
        """The parameters of whose matrices ranks have parts."""

    def orthogonalized(
        self,
        cut: tuple[str, ...],
        given: Sequence[tuple[str, Tensor]],
        costs: Sequence[int],
        compute: Callable[[Sequence[tuple[str, Tensor]]], Sequence[Tensor]],
    ) -> list[Tensor]:
        """Return this rank's blocks of what `compute` makes of whole parameters; `given` has the flat blocks, by name.

        Parameters are shared out over the ranks by `costs`. Collective along `cut`.
        """
        ranks = self._groups[cut]
        owners = _owners(costs, ranks.world_size)
        blocks = [self._blocks[fqn] for fqn, _ in given]
        mine = [at for at, owner in enumerate(owners) if owner == ranks.rank]
        out = [[at for at, owner in enumerate(owners) if owner == rank] for rank in range(ranks.world_size)]
        there = [sum(blocks[at][ranks.rank].numel for at in members) for members in out]
        here = [sum(blocks[at][rank].numel for at in mine) for rank in range(ranks.world_size)]
        source = torch.cat([given[at][1].reshape(-1) for members in out for at in members])
        arrived = source.new_empty(sum(here))
        ranks.all_to_all(
            wrap_torch(arrived), wrap_torch(source), counts=here, source_counts=there, label="blocks of matrices"
        )
        parts = iter(
            arrived.split_with_sizes([blocks[at][rank].numel for rank in range(ranks.world_size) for at in mine])
        )
        wholes = {at: arrived.new_zeros(blocks[at][0].shape) for at in mine}
        for rank in range(ranks.world_size):
            for at in mine:
                _move(blocks[at][rank], next(parts), wholes[at], is_read=False)
        done = compute([(given[at][0], wholes[at]) for at in mine])
        back = torch.empty_like(arrived)
        parts = iter(back.split_with_sizes([blocks[at][rank].numel for rank in range(ranks.world_size) for at in mine]))
        for rank in range(ranks.world_size):
            for at, whole in zip(mine, done, strict=True):
                _move(blocks[at][rank], next(parts), whole, is_read=True)
        result = torch.empty_like(source)
        ranks.all_to_all(
            wrap_torch(result), wrap_torch(back), counts=there, source_counts=here, label="orthogonal blocks"
        )
        order = [at for members in out for at in members]
        pieces = result.split_with_sizes([blocks[at][ranks.rank].numel for at in order])
        found = dict(zip(order, pieces, strict=True))
        return [found[at] for at in range(len(given))]


def _owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item: the most expensive first, to the rank with the least so far."""
    load, owners = [0] * ranks, [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        owners[at] = load.index(min(load))
        load[owners[at]] += costs[at]
    return owners


def _move(block: Block, part: Tensor, whole: Tensor, *, is_read: bool) -> None:
    """Copy a flat block to its place in `whole`, or from there where that `is_read`."""
    for box in block.boxes(0, block.numel):
        own = part.as_strided(box.lengths, box.strides, part.storage_offset() + box.offset)
        place = whole
        for dim, (start, length) in enumerate(zip(box.corner, box.lengths, strict=True)):
            place = place.narrow(dim, start, length)
        if is_read:
            own.copy_(place)
        else:
            place.copy_(own)
