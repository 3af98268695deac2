"""Buffers whose memory is a torch tensor, on any device that torch supports."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from polyaccel.accelerators.memory.host import aligned_shift, spare_nbytes
from polyaccel.core.buffer import Buffer, CountedBuffer, WriteCount
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError, ShardingError

_TORCH_DTYPE: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in DType}
_PAGED_NBYTES = 2**18
_HUGE_NBYTES = 2**21
_PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
_DTYPE_OF = {theirs: ours for ours, theirs in _TORCH_DTYPE.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's element type.

    Args:
        dtype: Element type.

    Returns:
        The torch type of the same name.
    """
    return _TORCH_DTYPE[dtype]


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the element type of a torch type.

    Args:
        dtype: torch's type.

    Returns:
        The type of the same name.

    Raises:
        ShardingError: The engine does not support the type (complex, ...).
    """
    try:
        return _DTYPE_OF[dtype]
    except KeyError:
        known = ", ".join(sorted(known.value for known in DType))
        raise ShardingError(
            f"the engine does not handle tensors of {dtype}", hint=f"convert to one of {known}", value=dtype
        ) from None


@cache
def _device_id(device: torch.device) -> DeviceId:
    return DeviceId(device.type, device.index)


@cache
def _pins(device_type: str) -> bool:
    """Whether host memory can be page-locked for copies to a device."""
    if device_type == "cpu":
        return False
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class TorchBuffer(CountedBuffer):
    """A flat buffer over a one-dimensional contiguous tensor.

    Args:
        tensor: Shape (numel,), contiguous. The buffer keeps it alive and shares its memory.
        writes: See `CountedBuffer`.

    Raises:
        ShardingError: The tensor has another shape or is not contiguous.
    """

    def __init__(self, tensor: torch.Tensor, *, writes: WriteCount | None = None) -> None:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ShardingError(f"a buffer is flat and contiguous, not of shape {tuple(tensor.shape)}", value=tensor)
        super().__init__(writes)
        self._tensor = tensor
        self.numel = tensor.numel()
        self.dtype = dtype_of(tensor.dtype)
        self.device = _device_id(tensor.device)

    @property
    def raw(self) -> torch.Tensor:
        return self._tensor

    def view(self, offset: int, numel: int) -> TorchBuffer:
        self._check_range(offset, numel)
        part = TorchBuffer.__new__(TorchBuffer)  # hundreds a step; what is cut from a buffer needs no check
        part._writes, part._tensor = self._writes, self._tensor.narrow(0, offset, numel)
        part.numel, part.dtype, part.device = numel, self.dtype, self.device
        return part

    def copy_from(self, source: Buffer) -> None:
        self._check_source(source)
        self._tensor.copy_(source.raw if isinstance(source, TorchBuffer) else _import_foreign(source))
        self.bump_version()

    def start_copy(self, source: Buffer) -> None:
        # torch converts element types on the host, in memory that is not page-locked.
        if not isinstance(source, TorchBuffer) or source.dtype is not self.dtype:
            self.copy_from(source)
            return
        self._check_source(source)
        self._tensor.copy_(source.raw, non_blocking=self._tensor.is_pinned() or source.raw.is_pinned())
        self.bump_version()

    def fill(self, value: float) -> None:
        self._tensor.fill_(value)
        self.bump_version()

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()

    def use_count(self) -> int:
        return int(torch._C._storage_Use_Count(self._tensor.untyped_storage()._cdata))

    def to_bytes(self) -> bytes:
        return self._tensor.view(torch.uint8).cpu().numpy().tobytes()

    def copy_to_host(self, target: memoryview) -> None:
        torch.from_numpy(np.frombuffer(target, np.uint8)).copy_(self._tensor.view(torch.uint8))

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        nbytes = self._check_nbytes(data)
        # By way of numpy: torch warns of every read-only `bytes`, although it would only be read.
        # From page-locked memory, which torch keeps until the copy has ended, the host does not wait for the device.
        pins = _pins(self._tensor.device.type)
        staged = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pins)
        staged.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        self._tensor.view(torch.uint8).copy_(staged, non_blocking=pins)
        self.bump_version()


def _import_foreign(source: Buffer) -> torch.Tensor:
    """A host tensor with the contents of another framework's buffer, whose element types torch may not import."""
    staged = TorchBuffer(torch.empty(source.numel, dtype=torch_dtype(source.dtype), device="cpu"))
    staged.from_bytes(source.to_bytes())
    return staged.raw


_ordinary = torch.inference_mode(False)
"""Memory that is made while the caller is in inference mode serves training too, so it is made outside of that mode."""


@_ordinary
def allocate_torch(numel: int, dtype: DType, device: torch.device, *, pinned: bool = False) -> TorchBuffer:
    """Allocate zero-filled memory on a 64-byte boundary.

    Args:
        numel: Elements of the buffer.
        dtype: Element type.
        device: Device of the memory.
        pinned: Allocate page-locked host memory for `device` instead.

    Returns:
        A buffer over new memory.
    """
    if device.type != "cpu" and not pinned:
        return TorchBuffer(
            torch.zeros(numel, dtype=torch_dtype(dtype), device=device)
        )  # allocators align by 256 or more
    nbytes = numel * dtype.itemsize
    room_nbytes = nbytes + spare_nbytes(nbytes)
    room = torch.zeros(room_nbytes, dtype=torch.uint8, pin_memory=True) if pinned else host_memory(room_nbytes)
    shift = aligned_shift(room.data_ptr(), nbytes)
    return TorchBuffer(room.narrow(0, shift, nbytes).view(torch_dtype(dtype)))


def host_memory(nbytes: int) -> torch.Tensor:
    """Allocate zero-filled bytes of host memory.

    From 256 KiB on they are mapped from the system, which allocates each page when it is touched and gets all of them
    back when the tensor is freed. From 2 MiB on the pages are huge where the system has them.

    From malloc they would leave holes: under glibc an aligned request does not fit into the hole of an equal one, so
    buckets that come and go while the engine is built would stay resident, each at its own place.

    Args:
        nbytes: Bytes to allocate.

    Returns:
        Shape (nbytes,), uint8.

    Raises:
        MemoryError: There is no room.
    """
    if nbytes < _PAGED_NBYTES:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes of host memory cannot be allocated: {error}") from error
    if nbytes >= _HUGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


@_ordinary
def torch_over(memory: npt.NDArray[np.uint8], dtype: DType) -> TorchBuffer:
    """Make a buffer over the bytes of an array.

    Args:
        memory: Shape (nbytes,), uint8. The buffer keeps it alive.
        dtype: Element type of the buffer.

    Returns:
        A buffer over the same memory.
    """
    return TorchBuffer(torch.from_numpy(memory).view(torch_dtype(dtype)))


def import_torch(array: object) -> TorchBuffer:
    """Make a flat buffer over the memory of an array that exports DLPack.

    Args:
        array: Array of any shape, contiguous, on a device that torch supports. The buffer keeps it alive.

    Returns:
        A flat view.

    Raises:
        PluginContractError: The array does not export DLPack to torch.
        ShardingError: It is not contiguous.
    """
    try:
        tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise PluginContractError(
            f"torch cannot see the memory of a {kind}: {error}",
            hint="pass an array that exports DLPack, on a device that torch knows by it",
            value=kind,
        ) from error
    return wrap_torch(tensor)


def wrap_torch(array: object) -> TorchBuffer:
    """Make a flat buffer over the memory of a tensor. Its autograd history is left out.

    Args:
        array: Tensor of any shape, contiguous. The buffer keeps it alive.

    Returns:
        A flat view.

    Raises:
        PluginContractError: It is not a tensor.
        ShardingError: It is not contiguous.
    """
    if not isinstance(array, torch.Tensor):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise PluginContractError(f"a torch device cannot wrap a {kind}", hint="pass a torch.Tensor", value=kind)
    if not array.is_contiguous():
        raise ShardingError(
            f"a tensor of shape {tuple(array.shape)} and strides {array.stride()} is not contiguous",
            hint="pass tensor.contiguous()",
            value=tuple(array.stride()),
        )
    plain = array.detach() if array.requires_grad or array.dim() == 1 else array
    return TorchBuffer(plain if plain.dim() == 1 else plain.view(-1))
