"""An all-reduce that sends one bit an element and makes up for it later (1-bit Adam, Tang et al. 2021, section 4.2).

[Note: Error feedback]
Each rank sends the signs of what it has to add, with the mean magnitude of every block as its scale (blocks: Zheng et
al. 2019), and keeps what that leaves out for the next call. The rank that answers for a part averages what arrives,
sends signs and scales of the average, and keeps what those leave out. So errors do not add up over calls on the same
quantity, for example a momentum; a single result is rough. All ranks get the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import ShardingError

_BLOCK_NUMEL = 1024
_LABEL = "one bit an element"
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint8]


class CompressedAllReduce:
    """All-reduce of signs with error feedback, which averages one quantity over the ranks, call after call.

    It implements the compressed communication of 1-bit Adam (Tang et al. 2021), with a scale for each block of 1024
    elements (Zheng et al. 2019). See [Note: Error feedback]. The host's processor packs the signs.

    Args:
        numel: Elements of the quantity. Each object serves one tensor, and keeps the errors of both rounds in host
            memory: 4 (1 + 1/N) bytes for each element on N ranks.
        group: Communicator whose ranks take part, each with its own object; None is the default group.
    """

    def __init__(self, numel: int, group: Communicator | None = None) -> None:
        self.communicator = default_communicator() if group is None else group
        self.numel = numel
        world = self.communicator.world_size
        self._blocks = max(1, -(-numel // (world * _BLOCK_NUMEL)))
        self._part_numel = self._blocks * _BLOCK_NUMEL
        self._own_error = np.zeros((world, self._part_numel), np.float32)
        self._part_error = np.zeros((1, self._part_numel), np.float32)
        positions = np.arange(self._own_error.size).reshape(world, self._part_numel)
        self._numels = (positions < numel).reshape(world, self._blocks, -1).sum(axis=2)
        """Elements in each block of each part: the last ones are padding."""

    def __call__(self, tensor: Any) -> None:
        """Replace `tensor` by its average over the ranks. Collective.

        Args:
            tensor: Contiguous floating array or `Buffer` of `numel` elements, overwritten in place. A value that is not
                finite becomes NaN in its block, and enters no error.

        Raises:
            ShardingError: The tensor has another size or is not floating.
        """
        communicator = self.communicator
        buffer: Buffer = tensor if isinstance(tensor, Buffer) else communicator.accelerator.wrap(tensor)
        if buffer.numel != self.numel or not buffer.dtype.is_floating:
            raise ShardingError(
                f"{buffer!r} is not one of {self.numel} floating elements",
                hint="make a CompressedAllReduce for each tensor",
                value=buffer.numel,
            )
        if communicator.world_size == 1:
            return
        wide = communicator.accelerator.allocate(self.numel, DType.FLOAT32)
        wide.copy_from(buffer)
        padded = np.zeros(self._own_error.size, np.float32)
        padded[: self.numel] = np.frombuffer(wide.to_bytes(), np.float32)
        bits, scales = _compress(padded.reshape(self._own_error.shape), self._own_error, self._numels)
        arrived = _expand(self._exchange(bits), self._exchange(scales))
        average = arrived.mean(axis=0, dtype=np.float32, keepdims=True)
        mine = slice(communicator.rank, communicator.rank + 1)
        bits, scales = _compress(average, self._part_error, self._numels[mine])
        averages = _expand(self._gather(bits), self._gather(scales)).reshape(-1)[: self.numel]
        wide.from_bytes(averages.tobytes())
        buffer.copy_from(wide)

    def _exchange(self, sent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Row r goes to rank r; row r of the result comes from there."""
        communicator = self.communicator
        source = _buffer_of(communicator, sent)
        out = communicator.allocate(source.numel, source.dtype)
        communicator.all_to_all(out, source, label=_LABEL)
        return np.frombuffer(out.to_bytes(), sent.dtype).reshape(sent.shape)

    def _gather(self, sent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every rank's only row."""
        communicator = self.communicator
        source = _buffer_of(communicator, sent)
        out = communicator.allocate(source.numel * communicator.world_size, source.dtype)
        communicator.all_gather(out, source, label=_LABEL)
        return np.frombuffer(out.to_bytes(), sent.dtype).reshape(communicator.world_size, -1)


def _compress(values: Floats, error: Floats, numels: npt.NDArray[Any]) -> tuple[Bits, Floats]:
    """Return packed signs and block scales of `values + error`; `error` keeps the rest, padding counts for nothing."""
    is_real = np.arange(_BLOCK_NUMEL) < numels[:, :, None]
    wanted = np.where(is_real, (values + error).reshape(is_real.shape), np.float32(0))
    with np.errstate(invalid="ignore", over="ignore"):
        scales = (np.abs(wanted).sum(axis=2) / np.maximum(numels, 1)).astype(np.float32)
        scales[~np.isfinite(scales)] = np.nan
        bits = np.packbits(wanted.reshape(len(wanted), -1) >= 0, axis=1)
        left_out = np.where(is_real, wanted - _expand(bits, scales).reshape(is_real.shape), np.float32(0))
    error[:] = np.where(np.isfinite(left_out), left_out, np.float32(0)).reshape(error.shape)
    return bits, scales


def _expand(bits: Bits, scales: Floats) -> Floats:
    """The numbers that signs and scales stand for, row by row."""
    signs = np.unpackbits(bits, axis=1).astype(np.float32) * 2 - 1
    return (signs.reshape(len(bits), -1, _BLOCK_NUMEL) * scales[:, :, None]).reshape(len(bits), -1)


def _buffer_of(communicator: Communicator, values: npt.NDArray[Any]) -> Buffer:
    buffer = communicator.allocate(values.size, DType.parse(values.dtype.name))
    buffer.from_bytes(np.ascontiguousarray(values).tobytes())
    return buffer
