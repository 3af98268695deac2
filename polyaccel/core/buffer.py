"""Flat device memory as the engine sees it: `Buffer`.

A `Buffer` is one-dimensional, contiguous, of one element type. Kernels and communicators use the framework's array
(`raw`); the ZeRO step only cuts views, copies and fills. It stands below `ops` and `accelerators` because the first
declares kernels on buffers and the second allocates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import ShardingError


class Buffer(ABC):
    """`numel` elements of `dtype` on `device`.

    Code that writes through `raw` calls `bump_version`, so that frontends detect changes of views that they handed out.
    """

    numel: int
    dtype: DType
    device: DeviceId

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    @property
    @abstractmethod
    def raw(self) -> Any:
        """The framework's own flat array over this memory: a torch tensor, a numpy array, ..."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of writes by the engine so far; a view shares it with the buffer that it was cut from."""

    @abstractmethod
    def bump_version(self) -> None:
        """Count one write in `version`."""

    @abstractmethod
    def view(self, offset: int, numel: int) -> Buffer:
        """Cut a view of the same memory.

        Args:
            offset: First element.
            numel: Elements of the view.

        Returns:
            Elements [offset, offset + numel). The view keeps the memory alive and shares `version`.

        Raises:
            ShardingError: The elements do not lie inside.
        """

    @abstractmethod
    def copy_from(self, source: Buffer) -> None:
        """Overwrite with the elements of another buffer. Queued on the current stream where the device has streams.

        Args:
            source: Buffer of equal `numel` that shares none of this memory. Another element type is converted, rounding
                to nearest even.

        Raises:
            ShardingError: `source` has another length.
        """

    def start_copy(self, source: Buffer) -> None:
        """Overwrite as `copy_from` does, without waiting for the device where one side is page-locked host memory.

        The host leaves both sides alone until an event is reached that the current stream records afterwards. The
        default is `copy_from`.

        Args:
            source: Buffer of equal `numel` that shares none of this memory.

        Raises:
            ShardingError: `source` has another length.
        """
        self.copy_from(source)

    @abstractmethod
    def fill(self, value: float) -> None:
        """Set every element. Queued on the current stream where the device has streams.

        Args:
            value: The number, converted to the element type.
        """

    @abstractmethod
    def data_ptr(self) -> int:
        """Return the address of the first element."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Copy the contents to host memory, after everything queued before on the *current* stream.

        The caller makes that stream wait (`Stream.wait`) for other streams whose work must be included.

        Returns:
            `nbytes` bytes, little-endian.
        """

    def copy_to_host(self, target: memoryview) -> None:
        """Write what `to_bytes` returns into host memory.

        Args:
            target: Writable memory of `nbytes` bytes. It is complete when the call returns.
        """
        target[:] = self.to_bytes()

    @abstractmethod
    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """Overwrite with bytes from `to_bytes`, in the order of the current stream.

        Args:
            data: Exactly `nbytes` bytes, little-endian. They may change once this has returned.

        Raises:
            ShardingError: `data` has another length.
        """

    def use_count(self) -> int:
        """Count the arrays over this memory, views included.

        When the number has grown since the memory was lent, the borrower still has views of it.

        Returns:
            The number; 0 where it is not known.
        """
        return 0

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.raw.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.raw.__dlpack_device__()

    def __len__(self) -> int:
        return self.numel

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.numel} x {self.dtype.value} on {self.device})"


class WriteCount:
    """Number of writes to a piece of memory, shared by a buffer and every view cut from it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class CountedBuffer(Buffer):
    """A buffer whose `version` is a `WriteCount` that its views share. Subclasses bring the memory.

    Args:
        writes: Counter of the buffer that this one is a view of (`writes=self._writes`); None for new memory.
    """

    def __init__(self, writes: WriteCount | None = None) -> None:
        self._writes = writes if writes is not None else WriteCount()

    @property
    def version(self) -> int:
        return self._writes.value

    def bump_version(self) -> None:
        self._writes.value += 1

    def _check_range(self, offset: int, numel: int) -> None:
        if offset < 0 or numel < 0 or offset + numel > self.numel:
            raise ShardingError(
                f"elements [{offset}, {offset + numel}) are outside {self!r}",
                hint=f"a view lies inside [0, {self.numel})",
                value=(offset, numel),
            )

    def _check_source(self, source: Buffer) -> None:
        if source.numel != self.numel:
            raise ShardingError(
                f"cannot copy {source!r} to {self!r}", hint="cut views of equal numel", value=source.numel
            )

    def _check_nbytes(self, data: bytes | bytearray | memoryview) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes != self.nbytes:
            raise ShardingError(f"{nbytes} bytes cannot fill {self!r} of {self.nbytes} bytes", value=nbytes)
        return nbytes


class BufferViews:
    """Views of buffers at fixed places, cut once and used in every step.

    They are released with the `Buffer` that they were cut from, so that they keep no freed memory alive.

    Args:
        windows: For each view its first element and its number of elements.
    """

    def __init__(self, windows: Iterable[tuple[int, int]]) -> None:
        self._windows = tuple(windows)
        self._known: WeakKeyDictionary[Buffer, tuple[Buffer, ...]] = WeakKeyDictionary()

    def get_views(self, buffer: Buffer) -> tuple[Buffer, ...]:
        """Return the views of a buffer, cut at the first call.

        Args:
            buffer: Buffer in which every window lies.

        Returns:
            One view for each window.
        """
        views = self._known.get(buffer)
        if views is None:
            views = self._known[buffer] = tuple(buffer.view(*window) for window in self._windows)
        return views
