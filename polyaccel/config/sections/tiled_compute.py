"""The section about computation in tiles of tokens: `tiled_compute`."""

from __future__ import annotations

from polyaccel.config.section import Listed, PositiveInt, Section


class TiledComputeConfig(Section):
    """polyaccel's own section: a model of transformers computes its causal loss, and the feed-forward layers of its
    blocks, in tiles of tokens, so that memory does not grow with vocabulary x sequence. Torch only."""

    enabled: bool = False
    """Compute in tiles."""
    loss: bool = True
    """Compute logits and loss together, tile by tile, where labels are given in training; `outputs.logits` is None
    then. An error for a model whose loss is another one."""
    mlp: bool = True
    """Compute feed-forward layers tile by tile, and once more in the backward pass. An error where none is found."""
    loss_tokens: PositiveInt | None = None
    """Tokens whose logits are there at once; null is about 4 million logits."""
    mlp_tokens: PositiveInt | None = None
    """Tokens that are in a feed-forward layer at once; null is as many as the model has features, and at least 256."""
    mlps: Listed[tuple[str, ...]] = ()
    """The feed-forward layers, by class or full name, in place of those that are found by structure."""
    in_evaluation: bool = False
    """Compute the loss so in evaluation too, where labels are given: no logits there either."""
