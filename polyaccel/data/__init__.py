"""Training data without a framework: token files, packed documents, curricula and their analysis."""

from __future__ import annotations

from polyaccel.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

__all__ = ["IndexedDataset", "IndexedDatasetBuilder"]
