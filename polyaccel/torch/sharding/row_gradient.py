"""The gradient of an embedding as the rows that a batch used, for [Note: Gradients as rows]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyaccel.core.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.zero.plan.layout import Slice
from polyaccel.zero.update.optimizers import Shard


@dataclass(frozen=True, slots=True)
class RowGradient:
    """A gradient that is zero outside of the rows `indices`, each of which appears once."""

    indices: Tensor
    values: Tensor

    @classmethod
    def from_gradient(cls, gradient: Tensor) -> RowGradient:
        """The rows of a sparse gradient, or the rows of a dense one that are not all zero."""
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            return cls(gradient.indices()[0].contiguous(), gradient.values())
        indices = gradient.flatten(1).ne(0).any(1).nonzero()[:, 0]
        return cls(indices, gradient[indices])

    def write(self, place: Buffer, adds: bool) -> None:
        """Write the gradient to its place, as a `GradientWriter`."""
        if not adds:
            place.fill(0.0)
        whole = place.raw.view(-1, self.values[0].numel()) if len(self.values) else None
        if whole is not None:
            whole.index_add_(0, self.indices, self.values.flatten(1).to(whole.dtype))
            place.bump_version()


def sparse_slice(gradient: Tensor, piece: Slice, shard: Shard) -> Tensor:
    """The sparse form of a reduced gradient, as `SparseAdam` takes it: of whole rows, or of elements where `gradient`
    is the flat slice `piece`. Raises ShardingError where it is whole."""
    found = shard.find_rows()
    if found is None:
        raise ShardingError(
            f"SparseAdam was given the whole gradient of {piece.fqn!r}",
            hint="pass it the weights of embeddings with sparse=True, which share no weights with other layers; Adam "
            "takes any gradient",
            value=piece.fqn,
        )
    indices: Tensor = found.indices.view(0, found.count).raw
    if gradient.dim() == 1:
        width = shard.bucket.kind.row_numel
        elements = (indices[:, None] * width + torch.arange(width, device=indices.device)).flatten() - piece.start
        indices = elements[(elements >= 0) & (elements < piece.length)]
    return torch.sparse_coo_tensor(
        indices[None], gradient[indices], gradient.shape, is_coalesced=True, check_invariants=False
    )
