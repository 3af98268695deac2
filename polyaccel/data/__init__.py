"""Training data without a framework: token files, packed documents, curricula and their analysis."""

from __future__ import annotations

from polyaccel.data.analysis import DataAnalysis, vocabulary_counts, vocabulary_rarity
from polyaccel.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from polyaccel.data.packing import PackedDataset, block_diagonal_mask, cu_seqlens, pack, unpack

__all__ = [
    "DataAnalysis",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "PackedDataset",
    "block_diagonal_mask",
    "cu_seqlens",
    "pack",
    "unpack",
    "vocabulary_counts",
    "vocabulary_rarity",
]
