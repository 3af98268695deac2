"""The bytes of Python's own standard library, in windows for numpy: every twentieth file is for validation."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def open_corpus() -> tuple[bytes, bytes]:
    """The text to train on and the text to validate on; files are split by their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = [bytearray(), bytearray()]
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if _NOT_LIBRARY.isdisjoint(name.parts):
            is_held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] % 20 == 0
            parts[is_held_out] += file.read_bytes() + b"\0"
    return bytes(parts[0]), bytes(parts[1])


class Windows:
    """A text in windows of `context` bytes, side by side; batches are (tokens, targets), int32."""

    def __init__(self, text: bytes, context: int) -> None:
        self._bytes = np.frombuffer(text, np.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._context

    def batch(self, indices: Any) -> tuple[Any, Any]:
        begins = [int(index) * self._context for index in indices]
        rows = np.stack([self._bytes[begin : begin + self._context + 1] for begin in begins]).astype(np.int32)
        return rows[:, :-1], rows[:, 1:]

    def shuffled(self, samples: int, count: int, seed: int) -> list[int]:
        """The windows of the `count` samples after the first `samples`, in another order in each epoch."""
        positions = np.arange(samples, samples + count)
        epochs, places = positions // len(self), positions % len(self)
        orders = {epoch: np.random.default_rng([seed, epoch]).permutation(len(self)) for epoch in set(epochs.tolist())}
        return [int(orders[int(epoch)][place]) for epoch, place in zip(epochs, places, strict=True)]

    def share(self, count: int, rank: int, world_size: int) -> list[int]:
        """The windows that a rank validates: about `count` in all, spread evenly, equally many a rank."""
        each = max(1, min(count, len(self)) // world_size)
        spread: list[int] = np.linspace(0, len(self) - 1, each * world_size).astype(int).tolist()
        return spread[rank::world_size]
