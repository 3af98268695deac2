"""The compiled ops on host memory: one pass over a slice for every optimizer, whatever the element types.

The kernels are in csrc/kernels; this module puts their arguments together. They agree bitwise with
`polyaccel.ops.numpy.kernels` on every instruction set and for any number of threads ([Note: One rounding per operation]
in csrc/kernels/updates.h). Calls that they do not cover, above all updates in float64, go to the fallback table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.ops.base import (
    DEQUANTIZE,
    QUANTIZE,
    REDUCE,
    SCALE,
    SQUARE_SUMS,
    Formula,
    KernelTable,
    StochasticRounding,
    code_bits,
)
from polyaccel.ops.fused import COMPUTED_IN_FLOAT32, FusedKernels
from polyaccel.ops.native.library import CArray, CRounding, Native, native
from polyaccel.ops.rounding import halves
from polyaccel.ops.table import by_op

# The codes of csrc/kernels/kernels.h.
TYPES = {
    dtype: code
    for code, dtype in enumerate(
        (
            *(DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
            *(DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8),
        )
    )
}
_COMBINE = {ReduceOp.SUM: "sum", ReduceOp.AVG: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min", ReduceOp.PROD: "prod"}

_SQUARED = COMPUTED_IN_FLOAT32 | {DType.FLOAT64}
_NOTHING = CArray(None, 0)


def native_kernels(fallback: KernelTable, threads: Callable[[], int]) -> KernelTable:
    """`fallback` with the compiled kernels in front of it; `fallback` itself where they are not installed.

    Each call of a kernel calls `threads` for the number of threads that it may use.
    """
    found = native()
    if found.library is None:
        return fallback
    kernels = _NativeKernels(found, fallback, threads)
    return fallback.replaced(
        f"csrc {found.isa}",
        by_op(
            *(kernels.combine, kernels.scale, kernels.cast, kernels.square_sums, kernels.update),
            *(kernels.quantize, kernels.dequantize),
        ),
    )


def c_array(buffer: Buffer) -> CArray:
    return CArray(buffer.data_ptr(), TYPES[buffer.dtype])


def are_computed_in_float32(buffers: Sequence[Buffer | None]) -> bool:
    """Whether all buffers are float32, bfloat16 or float16 in host memory."""
    return all(b is None or (b.dtype in COMPUTED_IN_FLOAT32 and b.device.type == "cpu") for b in buffers)


class _NativeKernels(FusedKernels):
    """The kernels as methods; each has the signature of its op."""

    def __init__(self, library: Native, fallback: KernelTable, threads: Callable[[], int]) -> None:
        super().__init__(fallback)
        self._library = library
        self._threads = threads
        self._kinds = library.update_kinds()

    def _has(self, formula: Formula) -> bool:
        return formula.name in self._kinds

    def _fits(self, buffers: Sequence[Buffer | None]) -> bool:
        return are_computed_in_float32(buffers)

    def _sweep(
        self,
        name: str,
        arrays: Sequence[Buffer],
        out: Buffer | None,
        constants: Sequence[float],
        rounding: StochasticRounding | None,
    ) -> None:
        self._library.call(
            "pa_update",
            self._kinds[name],
            arrays[0].numel,
            (CArray * len(arrays))(*map(c_array, arrays)),
            len(arrays),
            _NOTHING if out is None else c_array(out),
            (c_double * len(constants))(*constants),
            len(constants),
            None if rounding is None else CRounding(halves(rounding.key), rounding.start),
            self._threads(),
        )

    def combine(self, target: Buffer, source: Buffer, op: ReduceOp) -> None:
        """See `ReduceFn`. `source` is rounded to `target`'s type first."""
        if are_computed_in_float32((target, source)):
            if source.numel != target.numel:
                raise ShardingError(f"{source!r} does not match {target!r}", value=source.numel)
            self._sweep(_COMBINE[op], (target, source), None, (), None)
            target.bump_version()
        elif target.dtype is source.dtype and target.dtype in TYPES and target.numel == source.numel:
            arguments = (TYPES[target.dtype], target.data_ptr(), source.data_ptr(), self._threads())
            self._library.call("pa_combine", self._kinds[_COMBINE[op]], target.numel, *arguments)
            target.bump_version()
        else:
            self._fallback[REDUCE](target, source, op)

    def scale(self, target: Buffer, factor: float) -> None:
        """See `ScaleFn`."""
        if are_computed_in_float32((target,)):
            self._sweep("scale", (target,), None, (factor,), None)
            target.bump_version()
        else:
            self._fallback[SCALE](target, factor)

    def square_sums(self, out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """See `SquareSumsFn`. What a piece adds depends on its contents only."""
        if out.dtype is not DType.FLOAT64 or not all(piece.dtype in _SQUARED for _, piece in pieces):
            self._fallback[SQUARE_SUMS](out, pieces)
            return
        for index, piece in pieces:
            if not 0 <= index < out.numel:
                raise ShardingError(f"{out!r} has no place {index} for the sum of {piece!r}", value=index)
        count = len(pieces)
        indices = (c_int64 * count)(*(index for index, _ in pieces))
        arrays = (CArray * count)(*(c_array(piece) for _, piece in pieces))
        numels = (c_int64 * count)(*(piece.numel for _, piece in pieces))
        self._library.call("pa_square_sums", out.data_ptr(), count, indices, arrays, numels, self._threads())
        out.bump_version()

    def quantize(self, source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `QuantizeFn`."""
        if not are_computed_in_float32((source,)):
            self._fallback[QUANTIZE](source, codes, scales, block_numel)
            return
        self._blocks("pa_quantize", source, codes, scales, block_numel)
        codes.bump_version()
        scales.bump_version()

    def dequantize(self, out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `DequantizeFn`."""
        if not are_computed_in_float32((out,)):
            self._fallback[DEQUANTIZE](out, codes, scales, block_numel)
            return
        self._blocks("pa_dequantize", out, codes, scales, block_numel)
        out.bump_version()

    def _blocks(self, name: str, values: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        bits = code_bits(values, codes, scales, block_numel)
        memory = (c_array(values), codes.data_ptr(), scales.data_ptr())
        self._library.call(name, bits, values.numel, block_numel, *memory, self._threads())
