"""Views that are cut once and used in every step."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from polyaccel.buffer import Buffer


class Cuts:
    """The views of buffers at `windows`, each an offset and a length in elements. They are forgotten with the `Buffer`
    that they were cut from, so that they keep no memory alive that its owner let go."""

    def __init__(self, windows: Iterable[tuple[int, int]]) -> None:
        self._windows = tuple(windows)
        self._known: WeakKeyDictionary[Buffer, tuple[Buffer, ...]] = WeakKeyDictionary()

    def of(self, buffer: Buffer) -> tuple[Buffer, ...]:
        """The views of `buffer`, one for each window."""
        views = self._known.get(buffer)
        if views is None:
            views = self._known[buffer] = tuple(buffer.view(*window) for window in self._windows)
        return views
