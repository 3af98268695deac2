"""Checkpoints in global coordinates: saved by any number of ranks, read by any other number."""

from polyaccel.checkpoint.format.commit import Commit
from polyaccel.checkpoint.format.manifest import BlobEntry, Manifest
from polyaccel.checkpoint.format.pieces import TensorPiece
from polyaccel.checkpoint.format.tensors import Piece, TensorEntry
from polyaccel.checkpoint.load.reader import CheckpointReader, TagStatus, list_checkpoints, open_checkpoint
from polyaccel.checkpoint.save.protocol import TagValidation, save_checkpoint
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.file import FileStorage

__all__ = [
    "BlobEntry",
    "CheckpointReader",
    "Commit",
    "FileStorage",
    "Manifest",
    "Piece",
    "Storage",
    "TagStatus",
    "TagValidation",
    "TensorEntry",
    "TensorPiece",
    "list_checkpoints",
    "open_checkpoint",
    "save_checkpoint",
]
