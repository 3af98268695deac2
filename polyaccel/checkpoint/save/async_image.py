"""A rank's file in memory that another process can read: filled by the rank, written by the process next to it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from weakref import finalize

from polyaccel.checkpoint.format.pieces import FileLayout, Read, TensorPiece
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server.protocol import seal_length
from polyaccel.ops.native import crc32

_NAME = "polyaccel-checkpoint"


class Image:
    """Memory for files of up to `nbytes`, which has no name: it is gone when no process has it open any more. Its
    length cannot change."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self._memory = mmap.mmap(descriptor, nbytes)
        self._close = finalize(self, os.close, descriptor)

    @classmethod
    def new(cls, nbytes: int) -> Image:
        """New memory. Raises CheckpointError when the system gives none."""
        descriptor = -1
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, nbytes)
            seal_length(descriptor)
            return cls(descriptor, nbytes)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise CheckpointError(
                f"{nbytes:,} bytes to stage a checkpoint in cannot be had: {error.strerror or error}",
                hint='lower "checkpoint.staging_memory", or set "checkpoint.async": false',
                value=nbytes,
            ) from error

    def fill(self, layout: FileLayout, contents: Sequence[TensorPiece | bytes]) -> None:
        """Copy in what the segments of a file of that `layout` hold."""
        with memoryview(self._memory) as memory:
            for segment, content in zip(layout.segments, contents, strict=True):
                with memory[segment.offset : segment.offset + segment.nbytes] as target:
                    if isinstance(content, bytes):
                        target[:] = content
                    else:
                        content.buffer.copy_to_host(target)

    def reading(self, layout: FileLayout) -> Read:
        """Reads the segments of the file that was filled in, where they lie."""

        def read(number: int, first: int, nbytes: int) -> memoryview:
            start = layout.segments[number].offset + first
            with memoryview(self._memory) as memory:
                return memory[start : start + nbytes]

        return read

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the memory to read or overwrite, to be released before `close`."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def take(self, offset: int, address: int, nbytes: int) -> None:
        """Copy in `nbytes` bytes of this process's memory. Other threads run meanwhile."""
        ctypes.memmove(self._address + offset, address, nbytes)

    def crc32(self, offset: int, nbytes: int, before: int = 0) -> int:
        """zlib's crc32 of so many bytes, continuing from the one `before` them. Other threads run meanwhile."""
        with self.view(offset, nbytes) as data:
            return crc32(data, before)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        """Release the memory in this process."""
        with suppress(BufferError):  # a write that failed: its error still holds what it read
            self._memory.close()
        self._close()
