"""Sums that every rank must agree on before anybody branches: squared norms, flags, overflow.

[Note: One small all-reduce]
At the end of a step each rank has, for each parameter, the squared norm of its own slice, whether the parameter got a
gradient here, and for each bucket whether gradients came too late for its reduction. All of it travels in one vector
of float64 through one all-reduce. Norm, overflow, the culprit's name, untouched parameters and late buckets follow from
that vector alone, so ranks cannot disagree. Each rank sums only its own slices, at every stage, and the total is
rounded to float32; hence the clip factor does not depend on how parameters are cut.
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


def square_sums(
    pieces: Sequence[tuple[Accelerator, int, Buffer]], sums: Buffer, accelerator: Accelerator
) -> array[float]:
    """`sums`, on the device, plus the squared norm of each piece at its index, on the host.

    A piece says whose kernels reach it: those of the device, or the host's for a gradient that rests there.
    """
    near = [(index, piece) for compute, index, piece in pieces if compute is accelerator]
    accelerator.kernels()[SQUARE_SUMS](sums, near)
    values = read_sums(sums)
    for host in dict.fromkeys(compute for compute, *_ in pieces if compute is not accelerator):
        own = sums_in(host, len(values))
        host.kernels()[SQUARE_SUMS](own, [(index, piece) for compute, index, piece in pieces if compute is host])
        for index, value in enumerate(read_sums(own)):
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
class GradientReport:
    """What all ranks know of the gradients of a step. Norms are of the true gradients, loss scale divided out.

    `culprit` is the first parameter, in layout order, whose gradient is not finite. `touched` holds the parameters with
    a gradient on some rank.
    """

    norm: float
    culprit: str | None
    touched: frozenset[str]
    late_buckets: tuple[int, ...]

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


def interpret_sums(values: array[float], layout: ShardLayout, loss_scale: float) -> GradientReport:
    """Read the agreed vector: squared norms of all parameters, then arrival counts, then late flags of all buckets."""
    count = len(layout.params)
    squares, arrivals, late = values[:count], values[count : 2 * count], values[2 * count :]
    names = [param.fqn for param in layout.params]
    culprit = next((name for name, square in zip(names, squares, strict=True) if not isfinite(square)), None)
    norm = sqrt(fsum(squares)) / loss_scale if culprit is None else float("inf" if _has_inf_only(squares) else "nan")
    return GradientReport(
        norm=_float32(norm),
        culprit=culprit,
        touched=frozenset(name for name, arrived in zip(names, arrivals, strict=True) if arrived),
        late_buckets=tuple(index for index, flag in enumerate(late) if flag),
    )


def _has_inf_only(squares: array[float]) -> bool:
    return not any(square != square for square in squares)


def _float32(value: float) -> float:
    """`value` rounded to float32: differences in the order of float64 additions vanish. See [Note: One small all-
    reduce]."""
    if not isfinite(value) or abs(value) > 3.4e38:
        return value
    return float(struct.unpack("f", struct.pack("f", value))[0])
