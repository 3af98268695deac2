"""`deepspeed.ops.aio`: tensors read from files and written to them in the background, by polyaccel's transfers."""

from __future__ import annotations

import os
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.errors import OffloadError, PolyaccelError
from polyaccel.offload.transfers import Transfer, memory_of, open_transfers, write_all
from polyaccel_deepspeed.accelerator import get_accelerator

_ALIGNMENT = 4096


class aio_handle:  # noqa: N801 - DeepSpeed's name
    """Reads and writes of tensors. An operation is cut into `intra_op_parallelism` pieces, each of which a thread
    transfers; `block_size`, `queue_depth`, `single_submit` and `overlap_events` have no effect."""

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._settings = (block_size, queue_depth, single_submit, overlap_events)
        self._threads = max(1, intra_op_parallelism)
        self._transfers = open_transfers(self._threads)
        self._host = choose_accelerator("cpu")
        self._under_way: list[tuple[list[Transfer], Tensor, Tensor | None]] = []
        """Of each operation its transfers, its bytes on the host, and the device's tensor to copy them to."""
        self._locked: dict[int, Tensor] = {}
        finalize(self, self._transfers.close)

    def get_block_size(self) -> int:
        """Return the block size that was given."""
        return self._settings[0]

    def get_queue_depth(self) -> int:
        """Return the queue depth that was given."""
        return self._settings[1]

    def get_single_submit(self) -> bool:
        """Return what was given."""
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        """Return what was given."""
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        """Return the threads of an operation."""
        return self._threads

    def get_alignment(self) -> int:
        """Return the bytes that DeepSpeed's buffers are multiples of; any number is right here."""
        return _ALIGNMENT * self._threads

    # One operation at a time.

    def read(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """As `sync_pread`."""
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """As `sync_pwrite`."""
        return self.sync_pwrite(buffer, filename, file_offset)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill a tensor from a file, and return 1. Raises OffloadError, for a file that is too short as well."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Write a tensor to a file, and return 1. Raises OffloadError."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    # Many at once.

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to fill a tensor from a file, and return 0; `wait` ends it."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Begin to write a tensor to a file, and return 0; `wait` ends it. A descriptor is written to at once."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """Fill a tensor from a file: now, or until `wait` with `async_op`. `validate` has no effect."""
        _require_contiguous(buffer)
        is_away = buffer.device.type != "cpu"
        host = torch.empty(buffer.nbytes, dtype=torch.uint8) if is_away else _bytes_of(buffer)
        self._begin(host, Path(filename), file_offset, buffer if is_away else None, writes=False)
        return 0 if async_op else self._finish_last()

    def pwrite(self, buffer: Tensor, filename: str | int, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """Write a tensor to a file or descriptor: now, or until `wait` with `async_op`. `validate` has no effect."""
        _require_contiguous(buffer)
        host = _bytes_of(buffer.cpu())
        if isinstance(filename, int):
            write_all(filename, memory_of(self._host.wrap(host)), file_offset)
            self._under_way.append(([], host, None))
        else:
            os.close(os.open(filename, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            self._begin(host, Path(filename), file_offset, None, writes=True)
        return 0 if async_op else self._finish_last()

    def wait(self) -> int:
        """Wait for every operation that was begun, and return their number. Raises OffloadError."""
        count = 0
        while self._under_way:
            count += self._finish_last()
        return count

    def _begin(self, host: Tensor, path: Path, offset: int, target: Tensor | None, *, writes: bool) -> None:
        transfers, done = list[Transfer](), 0
        for piece in host.tensor_split(self._threads):
            if piece.numel():
                transfers.append(self._transfers.start(path, offset + done, self._host.wrap(piece), writes=writes))
                done += piece.numel()
        self._under_way.append((transfers, host, target))

    def _finish_last(self) -> int:
        transfers, host, target = self._under_way.pop()
        errors = [error for each in transfers if (error := each.wait()) is not None]
        if errors:
            raise OffloadError(f"a file could not be transferred: {errors[0]}", value=str(errors[0])) from errors[0]
        if target is not None:
            _bytes_of(target).copy_(host)
        return 1

    # Memory.

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return a tensor of the host with the type of another one, pinned where the device pins memory."""
        made = torch.empty(num_elem, dtype=example_tensor.dtype)
        device = get_accelerator()
        locked: Tensor = made if device.device_name() == "cpu" else device.pin_memory(made)
        self._locked[locked.data_ptr()] = locked
        return locked

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Forget a tensor of `new_cpu_locked_tensor`. Return whether it was one."""
        return self._locked.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of `new_cpu_locked_tensor`, or pinned by torch."""
        return tensor.data_ptr() in self._locked or tensor.is_pinned()


def aio_read(
    buffer: Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool,
    validate: bool,
) -> int:  # fmt: skip
    """Fill a tensor from a file, and return 1."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).sync_pread(buffer, filename)


def aio_write(
    buffer: Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool,
    validate: bool,
) -> int:  # fmt: skip
    """Write a tensor to a file, and return 1."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).sync_pwrite(buffer, filename)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy a tensor into another one, and return 0."""
    dest.copy_(src)
    return 0


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _require_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise PolyaccelError("a tensor that is not contiguous cannot be transferred", hint="pass tensor.contiguous()")
