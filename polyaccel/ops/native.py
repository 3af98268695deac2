"""The ops on host memory, compiled: one pass over a slice for any of the optimizers, whatever the element types.

The kernels are in csrc/; here their arguments are put together. They agree bitwise with `polyaccel.ops.numpy_kernels`
on every instruction set and for any number of threads ([Note: One rounding an operation] in csrc/updates.h).
What they do not cover, float64 optimizers above all, is left to the table that they stand in front of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    CAST,
    COMBINE,
    DEQUANTIZE,
    LAMB_APPLY,
    LAMB_DIRECTION,
    LION,
    QUANTIZE,
    SCALE,
    SGD,
    SQUARE_SUMS,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    LionHyper,
    SgdHyper,
    StochasticRounding,
)
from polyaccel.ops.native_library import CArray, CRounding, Native, native
from polyaccel.ops.quantization import bits_of
from polyaccel.ops.random_bits import halves
from polyaccel.types import DType, ReduceOp

# The codes of csrc/kernels.h.
TYPES = {
    dtype: code
    for code, dtype in enumerate(
        (
            *(DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
            *(DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8),
        )
    )
}
_ADAM_DECOUPLED, _ADAM_L2 = 0, 1
_SGD_PLAIN, _SGD_FIRST, _SGD_MOMENTUM, _SGD_FIRST_NESTEROV, _SGD_NESTEROV = range(2, 7)
_ADAGRAD, _LION, _LAMB_DIRECTION, _LAMB_APPLY, _SCALE, _CAST = range(7, 13)
_COMBINE = {ReduceOp.SUM: 13, ReduceOp.AVG: 13, ReduceOp.MAX: 14, ReduceOp.MIN: 15, ReduceOp.PROD: 16}

_COMPUTED_IN_FLOAT32 = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
_SQUARED = _COMPUTED_IN_FLOAT32 | {DType.FLOAT64}
_NOTHING = CArray(None, 0)


def native_kernels(fallback: KernelTable, threads: Callable[[], int]) -> KernelTable:
    """`fallback` with the compiled kernels in front of it; `fallback` itself where they are not installed.

    `threads` is asked at each call how many threads it may use.
    """
    found = native()
    if found.library is None:
        return fallback
    kernels = _NativeKernels(found, fallback, threads)
    return fallback.replaced(
        f"csrc {found.isa}",
        {
            COMBINE: kernels.combine,
            SCALE: kernels.scale,
            CAST: kernels.cast,
            SQUARE_SUMS: kernels.square_sums,
            ADAM: kernels.adam,
            SGD: kernels.sgd,
            ADAGRAD: kernels.adagrad,
            LION: kernels.lion,
            LAMB_DIRECTION: kernels.lamb_direction,
            LAMB_APPLY: kernels.lamb_apply,
            QUANTIZE: kernels.quantize,
            DEQUANTIZE: kernels.dequantize,
        },
    )


def c_array(buffer: Buffer) -> CArray:
    return CArray(buffer.data_ptr(), TYPES[buffer.dtype])


def are_computed_in_float32(buffers: Sequence[Buffer | None]) -> bool:
    """Whether all of them are float32, bfloat16 or float16 in host memory."""
    return all(b is None or (b.dtype in _COMPUTED_IN_FLOAT32 and b.device.type == "cpu") for b in buffers)


class _NativeKernels:
    """The kernels as methods; each has the signature of its op."""

    def __init__(self, library: Native, fallback: KernelTable, threads: Callable[[], int]) -> None:
        self._library = library
        self._fallback = fallback
        self._threads = threads

    def _update(
        self,
        kind: int,
        arrays: Sequence[Buffer],
        out: Buffer | None,
        constants: Sequence[float],
        written: int,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """One sweep over `arrays`, the master weights first. `written` has bit i set when array i changes."""
        master = arrays[0]
        for other in (*arrays[1:], *((out,) if out is not None else ())):
            if other.numel != master.numel:
                raise ShardingError(f"{other!r} does not match {master!r}", value=other.numel)
        self._library.call(
            "pa_update",
            kind,
            master.numel,
            (CArray * len(arrays))(*map(c_array, arrays)),
            len(arrays),
            _NOTHING if out is None else c_array(out),
            (c_double * len(constants))(*constants),
            len(constants),
            None if rounding is None else CRounding(halves(rounding.key), rounding.start),
            self._threads(),
        )
        for index, array in enumerate(arrays):
            if written >> index & 1:
                array.mark_written()
        if out is not None:
            out.mark_written()

    def combine(self, target: Buffer, source: Buffer, op: ReduceOp) -> None:
        """See `CombineFn`. `source` is rounded to `target`'s type first."""
        if are_computed_in_float32((target, source)):
            self._update(_COMBINE[op], (target, source), None, (), 0b01)
        elif target.dtype is source.dtype and target.dtype in TYPES and target.numel == source.numel:
            arguments = (TYPES[target.dtype], target.data_ptr(), source.data_ptr(), self._threads())
            self._library.call("pa_combine", _COMBINE[op], target.numel, *arguments)
            target.mark_written()
        else:
            self._fallback[COMBINE](target, source, op)

    def scale(self, target: Buffer, factor: float) -> None:
        """See `ScaleFn`."""
        if are_computed_in_float32((target,)):
            self._update(_SCALE, (target,), None, (factor,), 0b1)
        else:
            self._fallback[SCALE](target, factor)

    def cast(self, source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
        """See `CastFn`."""
        if are_computed_in_float32((source, out)):
            self._update(_CAST, (source,), out, (), 0, rounding)
        else:
            self._fallback[CAST](source, out, rounding)

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
        out.mark_written()

    def adam(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        out: Buffer | None,
        hyper: AdamHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `AdamFn`."""
        arrays = (master, grad, exp_avg, exp_avg_sq)
        if not are_computed_in_float32((*arrays, out)):
            self._fallback[ADAM](master, grad, exp_avg, exp_avg_sq, out, hyper, grad_scale, rounding)
            return
        decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else hyper.weight_decay
        kind = _ADAM_DECOUPLED if hyper.decoupled else _ADAM_L2
        self._update(kind, arrays, out, _adam_constants(hyper, decay, grad_scale), 0b1101, rounding)

    def sgd(
        self,
        master: Buffer,
        grad: Buffer,
        momentum: Buffer | None,
        out: Buffer | None,
        hyper: SgdHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `SgdFn`."""
        if not are_computed_in_float32((master, grad, momentum, out)):
            self._fallback[SGD](master, grad, momentum, out, hyper, grad_scale, rounding)
            return
        constants = (hyper.lr, hyper.momentum, 1 - hyper.dampening, hyper.weight_decay, grad_scale)
        if momentum is None:
            self._update(_SGD_PLAIN, (master, grad), out, constants, 0b01, rounding)
            return
        kinds = (_SGD_FIRST_NESTEROV, _SGD_NESTEROV) if hyper.nesterov else (_SGD_FIRST, _SGD_MOMENTUM)
        self._update(kinds[not hyper.first], (master, grad, momentum), out, constants, 0b101, rounding)

    def adagrad(
        self,
        master: Buffer,
        grad: Buffer,
        sum_sq: Buffer,
        out: Buffer | None,
        hyper: AdagradHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `AdagradFn`."""
        if not are_computed_in_float32((master, grad, sum_sq, out)):
            self._fallback[ADAGRAD](master, grad, sum_sq, out, hyper, grad_scale, rounding)
            return
        rate = hyper.lr / (1 + (hyper.step - 1) * hyper.lr_decay)
        constants = (rate, hyper.eps, hyper.weight_decay, grad_scale)
        self._update(_ADAGRAD, (master, grad, sum_sq), out, constants, 0b101, rounding)

    def lion(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        out: Buffer | None,
        hyper: LionHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `LionFn`."""
        if not are_computed_in_float32((master, grad, exp_avg, out)):
            self._fallback[LION](master, grad, exp_avg, out, hyper, grad_scale, rounding)
            return
        betas = (hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2)
        constants = (*betas, hyper.lr, 1 - hyper.lr * hyper.weight_decay, grad_scale)
        self._update(_LION, (master, grad, exp_avg), out, constants, 0b101, rounding)

    def lamb_direction(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        direction: Buffer,
        hyper: AdamHyper,
        grad_scale: float,
    ) -> None:
        """See `LambDirectionFn`."""
        arrays = (master, grad, exp_avg, exp_avg_sq, direction)
        if not are_computed_in_float32(arrays):
            self._fallback[LAMB_DIRECTION](master, grad, exp_avg, exp_avg_sq, direction, hyper, grad_scale)
            return
        self._update(_LAMB_DIRECTION, arrays, None, _adam_constants(hyper, hyper.weight_decay, grad_scale), 0b11101)

    def lamb_apply(
        self,
        master: Buffer,
        direction: Buffer,
        out: Buffer | None,
        rate: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `LambApplyFn`."""
        if not are_computed_in_float32((master, direction, out)):
            self._fallback[LAMB_APPLY](master, direction, out, rate, rounding)
            return
        self._update(_LAMB_APPLY, (master, direction), out, (rate,), 0b01, rounding)

    def quantize(self, source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `QuantizeFn`."""
        if not are_computed_in_float32((source,)):
            self._fallback[QUANTIZE](source, codes, scales, block_numel)
            return
        self._blocks("pa_quantize", source, codes, scales, block_numel)
        codes.mark_written()
        scales.mark_written()

    def dequantize(self, out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `DequantizeFn`."""
        if not are_computed_in_float32((out,)):
            self._fallback[DEQUANTIZE](out, codes, scales, block_numel)
            return
        self._blocks("pa_dequantize", out, codes, scales, block_numel)
        out.mark_written()

    def _blocks(self, name: str, values: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        bits = bits_of(values, codes, scales, block_numel)
        memory = (c_array(values), codes.data_ptr(), scales.data_ptr())
        self._library.call(name, bits, values.numel, block_numel, *memory, self._threads())


def _adam_constants(hyper: AdamHyper, decay: float, grad_scale: float) -> tuple[float, ...]:
    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    betas = (hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2)
    return (*betas, 1 / correction1, 1 / math.sqrt(correction2), hyper.eps, hyper.lr, decay, grad_scale)
