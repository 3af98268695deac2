"""Sequences that are cut over ranks: attention by Ulysses and by a ring, and what each rank has of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.block_mask import AttentionRule, DocumentMask
from polyaccel.torch.context_parallel.losses import cross_entropy_over_ranks, mean_over_tokens
from polyaccel.torch.context_parallel.ring import ring_attention
from polyaccel.torch.context_parallel.settings import SequenceSettings
from polyaccel.torch.context_parallel.shares import HeadShares, TokenShares
from polyaccel.torch.context_parallel.ulysses import DistributedAttention, ulysses_attention

if TYPE_CHECKING:
    from polyaccel.torch.context_parallel.models import SequenceParallel

__all__ = [
    "AttentionRule",
    "DistributedAttention",
    "DocumentMask",
    "HeadShares",
    "SequenceSettings",
    "TokenShares",
    "apply_context_parallel",
    "cross_entropy_over_ranks",
    "mean_over_tokens",
    "ring_attention",
    "ulysses_attention",
]


def apply_context_parallel(
    model: nn.Module, communicator: Communicator, settings: SequenceSettings | None = None
) -> SequenceParallel:
    """From now on cut the sequences of `model`, one of transformers' or a module around one (PEFT's), over the ranks of
    `communicator`, which are all called with the same batches. Returns what undoes it.

    A forward pass keeps this rank's tokens of `input_ids`, `attention_mask`, `position_ids`, `labels` and so on; its
    loss has the mean over all tokens as value, and gradients whose mean over the ranks is that of this mean. The
    model's buckets are therefore to be reduced over data x sequence ranks, as a mean. See
    `polyaccel.torch.context_parallel.models`.

    Raises PolyaccelError, with the part of the model that it cannot be done for: an encoder with a decoder, layers that
    mix tokens other than by attention, positions that cannot be given, attention that transformers does not choose by
    name.
    """
    try:
        from polyaccel.torch.context_parallel.models import SequenceParallel
    except ModuleNotFoundError as error:
        raise PolyaccelError(
            f"sequences of this model cannot be cut over ranks: {error}",
            hint="install transformers, whose models it serves, or call ulysses_attention or ring_attention in layers "
            "of your own",
        ) from error
    return SequenceParallel(model, communicator, settings or SequenceSettings())
