"""A buffer whose contents rest in a file: every access reads or writes it. See [Note: Non-resident buffers]."""

from __future__ import annotations

from typing import Any, NoReturn

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer, CountedBuffer, WriteCount
from polyaccel.core.types import DType
from polyaccel.errors import InvariantError
from polyaccel.offload.state_file import StateFile

_TILE_NBYTES = 16 * 2**20
"""Copies go through host memory in tiles of this size."""


class FileBuffer(CountedBuffer):
    """Elements [offset, offset + numel) of a file of `dtype`. `host` allocates the memory that copies go through."""

    def __init__(
        self,
        file: StateFile,
        numel: int,
        dtype: DType,
        host: Accelerator,
        *,
        offset: int = 0,
        writes: WriteCount | None = None,
    ) -> None:
        super().__init__(writes)
        self.file = file
        self.numel = numel
        self.dtype = dtype
        self.device = host.current_device()
        self._host = host
        self._offset = offset

    @property
    def raw(self) -> Any:
        self._refuse("raw memory")

    def data_ptr(self) -> int:
        self._refuse("address")

    def _refuse(self, what: str) -> NoReturn:
        raise InvariantError(
            f"{self!r} rests in {self.file.path} and has no {what}",
            hint="copy it to a buffer in memory, or take what the tier lends",
            value=str(self.file.path),
        )

    def view(self, offset: int, numel: int) -> FileBuffer:
        self._check_range(offset, numel)
        place = self._offset + offset
        return FileBuffer(self.file, numel, self.dtype, self._host, offset=place, writes=self._writes)

    def copy_from(self, source: Buffer) -> None:
        self._check_source(source)
        for start, numel in self._tiles():
            tile = source.view(start, numel)
            if tile.dtype is not self.dtype:
                staged = self._host.allocate(numel, self.dtype)
                staged.copy_from(tile)
                tile = staged
            self._write(start, tile.to_bytes())
        self.bump_version()

    def fill(self, value: float) -> None:
        for start, numel in self._tiles():
            staged = self._host.allocate(numel, self.dtype)
            staged.fill(value)
            self._write(start, staged.to_bytes())
        self.bump_version()

    def to_bytes(self) -> bytes:
        return bytes(self.file.read(self._offset * self.dtype.itemsize, self.nbytes))

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._check_nbytes(data)
        self._write(0, data)
        self.bump_version()

    def _write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        self.file.write((self._offset + start) * self.dtype.itemsize, data)

    def _tiles(self) -> list[tuple[int, int]]:
        step = _TILE_NBYTES // self.dtype.itemsize
        return [(start, min(step, self.numel - start)) for start in range(0, self.numel, step)]
