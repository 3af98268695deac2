"""Text that every machine has: the source of Python's own standard library, as two memory-mapped files of bytes.

Files are split by name, not by position, so no function is half in training and half in validation.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyaccel import PolyaccelError

SEPARATOR = b"\0"  # stands after each file; no source text has it
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    training: Path
    validation: Path
    digest: str


def open_corpus(root: Path | None = None, cache: Path | None = None) -> Corpus:
    """The corpus of the library in `root`, from `cache` if it was made before. Any number of processes may call this at
    once. Raises PolyaccelError when `root` has too little source."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyaccel"
    files = sorted(file for file in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(file.relative_to(root).parts))
    texts = {file.relative_to(root).as_posix(): file.read_bytes() + SEPARATOR for file in files}
    held_out = {name for name in texts if hashlib.sha256(name.encode()).digest()[0] % 20 == 0}
    parts = [b"".join(text for name, text in texts.items() if (name in held_out) is part) for part in (False, True)]
    if not all(parts):
        hint = "use a Python that has its library as source files"
        raise PolyaccelError(f"too few source files to train and validate on: {root}", hint=hint, value=str(root))
    digest = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    found = [cache / f"stdlib-{digest}-{part}.bin" for part in ("training", "validation")]
    for file, text in zip(found, parts, strict=True):
        if not file.exists() or file.stat().st_size != len(text):
            with tempfile.NamedTemporaryFile(dir=cache, delete=False) as draft:  # so that it appears whole
                draft.write(text)
            Path(draft.name).replace(file)
    return Corpus(found[0], found[1], digest)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A file's bytes in windows of `context`, side by side: (tokens, targets), int64, targets one byte later."""

    def __init__(self, file: Path, context: int) -> None:
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.memmap(file, dtype=np.uint8, mode="r")
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.context
        window = torch.from_numpy(self.bytes[begin : begin + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def validation_share(windows: Sized, *, count: int, rank: int, world_size: int) -> list[int]:
    """Which windows this rank evaluates: about `count` in all, spread evenly over the file, equally many a rank."""
    each = max(1, min(count, len(windows)) // world_size)
    spread: list[int] = np.linspace(0, len(windows) - 1, each * world_size).astype(int).tolist()
    return spread[rank::world_size]
