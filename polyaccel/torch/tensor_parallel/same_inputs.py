"""Ranks that share layers compute parts of one batch: other inputs on one of them would give wrong sums in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError


def require_same_inputs(communicator: Communicator, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Compare a module's inputs on the ranks that share its layers. Collective.

    Args:
        communicator: These ranks.
        inputs: Inputs of the module.
        named: Named inputs.

    Raises:
        ShardingError: Ranks have other inputs.
    """
    described = [_describe(one) for one in tree_leaves((tuple(inputs), dict(named)))]
    of_ranks = communicator.all_gather_object(described)
    others = [communicator.ranks[at] for at, one in enumerate(of_ranks) if one != of_ranks[0]]
    if others:
        raise ShardingError(
            f"ranks {others} were given another batch than rank {communicator.ranks[0]}, with which they share layers",
            hint="give all of them the same samples: take shards by polyaccel.comm.groups.get_data_parallel_rank(), or "
            "the engine's loader",
            value=others,
        )


def _describe(leaf: Any) -> object:
    """Return what two equal leaves have in common, and others have not."""
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__
    facts = (tuple(leaf.shape), str(leaf.dtype))
    if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.is_meta or leaf.layout is not torch.strided:
        return facts
    values = leaf.detach().to("cpu", copy=False).contiguous().reshape(-1)
    return (*facts, crc32(values.view(torch.uint8).numpy().data))
