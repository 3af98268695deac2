"""Training data without a framework: token files, packed documents, curricula and their analysis."""

from __future__ import annotations

from polyaccel.data.analysis import DataAnalysis, vocabulary_counts, vocabulary_rarity
from polyaccel.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from polyaccel.data.packing import PackedDataset, block_diagonal_mask, cu_seqlens, pack, unpack
from polyaccel.data.streams import WholeStream
from polyaccel.data.token_batches import TokenBatches, group_by_tokens

__all__ = [
    "DataAnalysis",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "PackedDataset",
    "TokenBatches",
    "WholeStream",
    "block_diagonal_mask",
    "cu_seqlens",
    "group_by_tokens",
    "pack",
    "unpack",
    "vocabulary_counts",
    "vocabulary_rarity",
]
