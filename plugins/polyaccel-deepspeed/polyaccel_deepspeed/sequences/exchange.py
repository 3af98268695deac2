"""Functions of `deepspeed.sequence.layer` that scripts call themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from polyaccel.errors import PolyaccelError


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate the first features of `t`, as many as the frequencies have, by halves (Su et al. 2021)."""
    width = freqs_cos.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * freqs_cos + torch.cat((-second, first), dim=-1) * freqs_sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def single_all_to_all(
    input: Tensor,  # noqa: A002 - DeepSpeed's name
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: Any,
    async_op: bool = False,
    handle: Any = None,
    type: Any = None,  # noqa: A002 - likewise
    num_kv_heads: int | None = None,
) -> Tensor:
    """Exchange parts of the dim `scatter_idx` for parts of the dim `gather_idx`, without a gradient. Collective.

    Raises PolyaccelError for `async_op`, and for a dim that the ranks do not divide.
    """
    ranks, length = dist.get_world_size(group), input.shape[scatter_idx]
    if async_op or length % ranks:
        what = "async_op=True" if async_op else f"{length} parts for {ranks} ranks"
        hint = "use DistributedAttention, which overlaps and takes uneven numbers of heads"
        raise PolyaccelError(f"single_all_to_all: {what}", hint=hint, value=async_op or length)
    sent = torch.stack(input.detach().chunk(ranks, dim=scatter_idx))
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return torch.cat(list(found), dim=gather_idx)
