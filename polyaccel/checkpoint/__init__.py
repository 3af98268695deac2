"""Checkpoints in global coordinates: saved by any number of ranks, read by any other number."""

from polyaccel.checkpoint.commit import Commit
from polyaccel.checkpoint.manifest import BlobEntry, Manifest
from polyaccel.checkpoint.pieces import TensorPiece
from polyaccel.checkpoint.reader import CheckpointReader, TagStatus, list_checkpoints, open_checkpoint
from polyaccel.checkpoint.save_protocol import TagValidation
from polyaccel.checkpoint.storage import FileStorage, Storage
from polyaccel.checkpoint.tensors import Piece, TensorEntry
from polyaccel.checkpoint.writer import save_checkpoint

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
