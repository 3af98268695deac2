"""`deepspeed.runtime.comm.coalesced_collectives`: means of several tensors, of which each rank gets a part.

`all_to_all_quant_reduce` computes the same means: nothing is quantised on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Reduce-scatter several tensors in one exchange.

    Args:
        tensors: Tensors of equal shapes on all ranks.
        group: torch's group; None for all ranks.

    Returns:
        The means over the ranks of this rank's part of each flattened tensor. Parts are as long as the tensor divided
        by the number of ranks, rounded up; the last ones may be shorter, or empty.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = [-(-tensor.numel() // ranks) for tensor in tensors]
    rows = [
        torch.nn.functional.pad(tensor.reshape(-1), (0, length * ranks - tensor.numel())).view(ranks, length)
        for tensor, length in zip(tensors, lengths, strict=True)
    ]
    if not rows:
        return []
    sent = torch.cat(rows, dim=1).div_(ranks)
    received = sent.new_empty(sent.shape[1])
    dist.reduce_scatter_tensor(received, sent.view(-1), group=group)
    return [
        part[: min(length, max(tensor.numel() - rank * length, 0))]
        for part, tensor, length in zip(received.split_with_sizes(lengths), tensors, lengths, strict=True)
    ]


def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """As `reduce_scatter_coalesced` over all ranks; DeepSpeed sends 4 bits a value between these groups."""
    return reduce_scatter_coalesced(tensors)
