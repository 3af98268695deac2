"""Squared norms of gradients, summed where the gradients are, and what follows from their totals over all ranks.

Each rank sums only its own slices, at every stage, in float64, and the total is rounded to float32; hence neither the
norm nor the clip factor depends on how parameters are cut, or on when a bucket's gradients arrived.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.base import Communicator
from polyaccel.ops.base import SQUARE_SUMS
from polyaccel.types import DType
from polyaccel.zero.layout import ShardLayout


def allocate_sums(accelerator: Accelerator, communicator: Communicator, count: int) -> Buffer:
    """A zeroed vector of `count` sums to exchange, float64 where the device has it."""
    return communicator.allocate(count, _sum_dtype(accelerator))


def sums_in(accelerator: Accelerator, count: int) -> Buffer:
    """A zeroed vector of `count` sums in the accelerator's own memory, float64 where it has that."""
    return accelerator.allocate(count, _sum_dtype(accelerator))


def _sum_dtype(accelerator: Accelerator) -> DType:
    return DType.FLOAT64 if DType.FLOAT64 in accelerator.capabilities().dtypes else DType.FLOAT32


class SquareSums:
    """`count` sums of squares, each piece added by kernels that reach it: the device's, or the host's for what rests
    there. Nothing waits for the device before `read`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: dict[Accelerator, Buffer] = {}

    def add(self, compute: Accelerator, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """Add the squared norm of each piece at its index."""
        if compute not in self._sums:
            self._sums[compute] = sums_in(compute, self._count)
        compute.kernels()[SQUARE_SUMS](self._sums[compute], pieces)

    def read(self) -> array[float]:
        """The sums, on the host."""
        values = array("d", bytes(8 * self._count))
        for sums in self._sums.values():
            for index, value in enumerate(read_sums(sums)):
                values[index] += value
        return values


def read_sums(sums: Buffer) -> array[float]:
    """The vector on the host; waits for the device."""
    values = array("d" if sums.dtype is DType.FLOAT64 else "f")
    values.frombytes(sums.to_bytes())
    return values


def write_sums(sums: Buffer, values: array[float]) -> None:
    """Overwrite the vector from the host."""
    sums.from_bytes(array("d" if sums.dtype is DType.FLOAT64 else "f", values).tobytes())


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """The norm of all ranks' gradients, loss scale divided out.

    `culprit` is the first parameter, in layout order, whose gradient is not finite.
    """

    norm: float
    culprit: str | None

    @classmethod
    def of(cls, squares: Sequence[float], layout: ShardLayout, loss_scale: float) -> GradientNorm:
        """From the squared norms of all parameters, in the layout's order."""
        names = [param.fqn for param in layout.params]
        culprit = next((name for name, square in zip(names, squares, strict=True) if not isfinite(square)), None)
        if culprit is None:
            return cls(_float32(sqrt(fsum(squares)) / loss_scale), None)
        is_nan = any(square != square for square in squares)
        return cls(float("nan" if is_nan else "inf"), culprit)

    @property
    def overflow(self) -> bool:
        return self.culprit is not None

    def clip_factor(self, max_norm: float) -> float:
        """What gradients are multiplied with so that their norm is at most `max_norm`; 1 when that is 0 (off).

        NaN for a norm that is NaN: what is wrong stays visible.
        """
        if max_norm <= 0.0:
            return 1.0
        factor = max_norm / (self.norm + 1e-6)
        return 1.0 if factor > 1.0 else factor


def _float32(value: float) -> float:
    """`value` rounded to float32: differences in the order of float64 additions vanish."""
    if not isfinite(value) or abs(value) > 3.4e38:
        return value
    return float(struct.unpack("f", struct.pack("f", value))[0])
