"""Flat device memory as the engine sees it.

A `Buffer` is one-dimensional, contiguous, of one element type. Kernels and communicators look inside (`raw`); the ZeRO
step only cuts views, copies and fills. It stands below `ops` and `accelerators` because the first declares kernels on
buffers and the second hands out both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from polyaccel.types import DeviceId, DType


class Buffer(ABC):
    """`numel` elements of `dtype` on `device`.

    Whoever writes through `raw` calls `mark_written`, so that frontends which hand out views know when those changed.
    """

    numel: int
    dtype: DType
    device: DeviceId

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    @abstractmethod
    def raw(self) -> Any:
        """The framework's own flat array over this memory: a torch tensor, a numpy array, ..."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """Grows with every write of the engine; a view shares it with the buffer that it was cut from."""

    @abstractmethod
    def mark_written(self) -> None:
        """Count one write in `generation`."""

    @abstractmethod
    def view(self, offset: int, numel: int) -> Buffer:
        """Elements [offset, offset + numel) of the same memory. Raises ShardingError when they do not lie inside."""

    @abstractmethod
    def copy_from(self, source: Buffer) -> None:
        """Overwrite with `source`, which has as many elements; converts the element type, rounding to nearest even."""

    @abstractmethod
    def fill(self, value: float) -> None:
        """Set every element to `value`."""

    @abstractmethod
    def data_ptr(self) -> int:
        """Address of the first element."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """A copy of the contents in host memory, little-endian, once everything queued before has written them."""

    @abstractmethod
    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """Overwrite with what `to_bytes` gave. Raises ShardingError when `data` is not exactly `nbytes` long."""

    def references(self) -> int:
        """How many arrays stand on this memory, views included; 0 where that is not known. When the number has grown
        since the memory was lent, the borrower's views are still in somebody's hands."""
        return 0

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.raw.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.raw.__dlpack_device__()

    def __len__(self) -> int:
        return self.numel

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.numel} x {self.dtype.value} on {self.device})"
