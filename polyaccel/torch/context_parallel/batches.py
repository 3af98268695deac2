"""A batch of a Hugging Face model, of which every rank of a sequence has the whole, cut into the ranks' tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.block_mask import DocumentMask
from polyaccel.torch.context_parallel.losses import IGNORED, targets_of_next_tokens
from polyaccel.torch.context_parallel.shares import TokenShares

TOKEN_DIMS = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "labels": 1,
    "shift_labels": 1,
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
    "attention_mask": -1,
    "position_ids": -1,
}
"""The arguments that have a number or a vector for each token, and their dim of tokens."""
KERNELS_OWN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position")
"""Arguments that describe the whole sequence to kernels of one device; marks of tokens take their place."""


@dataclass(frozen=True)
class WholeBatch:
    """The arguments of a forward pass, by name, and what follows for the tokens."""

    named: Mapping[str, Any]

    @property
    def tokens(self) -> Tensor | None:
        """The argument with the numbers of rows and tokens; None where there is none."""
        for name in ("input_ids", "inputs_embeds"):
            found = self.named.get(name)
            if isinstance(found, Tensor) and found.dim() >= 2:
                return found
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens."""
        tokens = self.tokens
        return (0, 0) if tokens is None else (tokens.shape[0], tokens.shape[1])

    @property
    def has_choices(self) -> bool:
        """Whether a row is several sequences, as for multiple choice."""
        ids = self.named.get("input_ids")
        return isinstance(ids, Tensor) and ids.dim() > 2

    def digest(self) -> tuple[int, ...]:
        """The shape of `input_ids` and a number that follows from its values and their places."""
        ids = self.named.get("input_ids")
        if type(ids) is not Tensor or ids.is_meta:  # a fake tensor, with which a plan counts memory, has no values
            return ()
        places = torch.arange(1, ids.numel() + 1, device=ids.device).remainder(8191)
        return (*ids.shape, int((ids.flatten().to(torch.int64) * places).sum()))

    def marks(self) -> DocumentMask:
        """Documents and padding, as transformers finds them: padding by `attention_mask`, documents by position ids
        that do not continue by one, but only where there is no `attention_mask`, or by `cu_seq_lens_q`."""
        rows, length = self.shape
        mask, positions = self.named.get("attention_mask"), self.named.get("position_ids")
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != length:
                shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise PolyaccelError(
                    f"attention_mask: {shape} cannot be cut over the ranks of a sequence",
                    hint=f"pass ({rows}, {length}), 1 for tokens and 0 for padding; packed documents by position_ids",
                    value=shape,
                )
            return DocumentMask(length, None, mask != 0)
        if isinstance(positions, Tensor):
            while positions.dim() > 2:  # several kinds of positions: (kinds, rows, length)
                positions = positions[0]
            return DocumentMask.of_positions(positions.reshape(-1, length))
        bounds = self.named.get("cu_seq_lens_q")
        return DocumentMask(length) if bounds is None or rows != 1 else DocumentMask.of_boundaries(bounds)

    def targets(self, *, shifted: bool) -> Tensor | None:
        """The label that each token is to predict, whole: `shift_labels`, or `labels`, shifted where the model is
        causal, so that the last token of a rank has the first one of the next. None without labels."""
        if self.named.get("shift_labels") is not None:
            return _label_a_token(self.named["shift_labels"], "shift_labels", self.shape)
        labels = self.named.get("labels")
        if labels is None:
            return None
        labels = _label_a_token(labels, "labels", self.shape)
        return targets_of_next_tokens(labels) if shifted else labels

    def cut(self, shares: TokenShares, rank: int) -> dict[str, Any]:
        """The arguments with `rank`'s tokens. Raises PolyaccelError for a tensor that may or may not have to be cut."""
        found: dict[str, Any] = {}
        for name, value in self.named.items():
            if name in KERNELS_OWN:
                continue
            if isinstance(value, Tensor) and name in TOKEN_DIMS and value.shape[TOKEN_DIMS[name]] == shares.total:
                value = own_part(value, shares, rank, TOKEN_DIMS[name])
            elif isinstance(value, Tensor) and tuple(value.shape[:2]) == self.shape:
                raise PolyaccelError(
                    f"{name}: a tensor of shape {tuple(value.shape)} may or may not be cut over the "
                    "ranks of a sequence",
                    hint=f"known are {', '.join(TOKEN_DIMS)}",
                    value=name,
                )
            found[name] = value
        return found


def own_part(tensor: Tensor, shares: TokenShares, rank: int, dim: int = 1) -> Tensor:
    """`rank`'s tokens of `tensor`, which has those of the whole sequence along `dim`."""
    parts = [tensor.narrow(dim, start, end - start) for start, end in shares.spans[rank] if end > start]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def target_count(targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """How many targets there are. A mean over none is NaN, as in torch."""
    return (targets != ignored).sum()


def _label_a_token(labels: Tensor, name: str, shape: tuple[int, int]) -> Tensor:
    if tuple(labels.shape) != shape:
        raise PolyaccelError(
            f"{name}: shape {tuple(labels.shape)}, but there are {shape[0]} rows of {shape[1]} tokens",
            hint="a sequence that is cut over ranks needs a label for each token",
            value=tuple(labels.shape),
        )
    return labels
