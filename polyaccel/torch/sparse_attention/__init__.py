"""Attention by blocks: layouts of blocks by name, and attention over the blocks of a layout."""

from __future__ import annotations

from polyaccel.torch.sparse_attention.attention import sparse_attention
from polyaccel.torch.sparse_attention.layouts import BlockPattern

__all__ = ["BlockPattern", "sparse_attention"]
