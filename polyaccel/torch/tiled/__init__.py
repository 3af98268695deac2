"""Computation in tiles of tokens, so that what lies between does not grow with the sequence: losses without whole
logits, and feed-forward layers without their whole inner activations."""

from __future__ import annotations

from polyaccel.torch.tiled.cross_entropy import tiled_cross_entropy
from polyaccel.torch.tiled.functions import tiled_map, tiled_sum

__all__ = ["tiled_cross_entropy", "tiled_map", "tiled_sum"]
