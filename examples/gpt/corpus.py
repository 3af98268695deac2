"""Text that every machine has: the source of Python's own standard library, byte by byte.

Files are split by name, not by position, so no function is half in training and half in validation.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyaccel import PolyaccelError

SEPARATOR = b"\0"  # after each file; no source text has it
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class Corpus(NamedTuple):
    training: bytes
    validation: bytes
    digest: str


def open_corpus(root: Path | None = None) -> Corpus:
    """Read the library in `root`. Raises PolyaccelError when it has too little source."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts = [bytearray(), bytearray()]
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if _NOT_LIBRARY.isdisjoint(name.parts):
            is_held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] % 20 == 0
            parts[is_held_out] += file.read_bytes() + SEPARATOR
    if not all(parts):
        hint = "use a Python that has its library as source files"
        raise PolyaccelError(f"too few source files to train and validate on: {root}", hint=hint, value=str(root))
    return Corpus(bytes(parts[0]), bytes(parts[1]), hashlib.sha256(b"".join(parts)).hexdigest()[:16])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text in windows of `context` bytes, side by side: (tokens, targets), int64, targets one byte later."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = np.frombuffer(text, dtype=np.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = range(len(self))[index] * self.context  # or IndexError
        window = torch.from_numpy(self.bytes[begin : begin + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]

    def share(self, count: int, rank: int, world_size: int) -> list[int]:
        """The windows that a rank validates: about `count` in all, spread evenly, equally many a rank."""
        each = max(1, min(count, len(self)) // world_size)
        spread: list[int] = np.linspace(0, len(self) - 1, each * world_size).astype(int).tolist()
        return spread[rank::world_size]
