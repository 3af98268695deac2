"""A notice board in shared memory: readable whatever its writers do, also when they are stopped or dead."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from zlib import crc32

from polyaccel.comm.backends.shm.memory import Bytes
from polyaccel.comm.base import StatusStore

NOTE_NBYTES = 4096
_HEAD = Struct("<II")  # length and checksum of the text
_TRIES = 100


class ShmBoard(StatusStore):
    """One area of `NOTE_NBYTES` for each global rank."""

    def __init__(self, notes: Bytes) -> None:
        self._notes = notes

    def set(self, rank: int, text: str) -> None:
        data = text.encode()[: NOTE_NBYTES - _HEAD.size]
        note = _HEAD.pack(len(data), crc32(data)) + data
        area = self._notes.data
        area[rank * NOTE_NBYTES : rank * NOTE_NBYTES + len(note)] = note

    def read(self, world_size: int) -> Mapping[int, str]:
        found = {rank: self._read(rank) for rank in range(world_size)}
        return {rank: text for rank, text in found.items() if text}

    def _read(self, rank: int) -> str:
        """The note; empty if there is none, or if it was never whole while it was looked at."""
        area = self._notes.data[rank * NOTE_NBYTES : (rank + 1) * NOTE_NBYTES]
        for _ in range(_TRIES):
            note = bytes(area)
            length, checksum = _HEAD.unpack_from(note)
            text = note[_HEAD.size : _HEAD.size + length]
            if length == len(text) and crc32(text) == checksum:
                return text.decode(errors="replace")
        return ""
