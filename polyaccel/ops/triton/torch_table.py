"""The ops on torch tensors of a device that Triton compiles for.

Triton compiles a kernel when it is first called with a combination of types, and keeps the result on disk. Whether
Triton can compile (it needs a C compiler and a driver) is tried when the table is made, not in a step; where it cannot,
torch's kernels stay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import triton

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import ShardingError
from polyaccel.ops.base import (
    CAST,
    DEQUANTIZE,
    LARGEST_CODE,
    QUANTIZE,
    SQUARE_SUMS,
    UPDATE,
    Formula,
    KernelTable,
    Rule,
    StochasticRounding,
    code_bits,
)
from polyaccel.ops.fused import COMPUTED_IN_FLOAT32, FusedKernels
from polyaccel.ops.recorded import RECORDED_UPDATE
from polyaccel.ops.rounding import halves
from polyaccel.ops.torch.rounding import signed
from polyaccel.ops.triton import keeps_subnormals
from polyaccel.ops.triton.blocks import add_up, dequantize_blocks, partial_square_sums, quantize_blocks
from polyaccel.ops.triton.numbers import BFLOAT16, FLOAT16, NOTHING, PLAIN
from polyaccel.ops.triton.updates import SWEEPS, recorded_sweep, sweep

_log = logging.getLogger(__name__)

_KINDS = {DType.BFLOAT16: BFLOAT16.value, DType.FLOAT16: FLOAT16.value}
_BLOCK_NUMEL = 1024
_SUM_BLOCK_NUMEL = 4096
_MOST_BLOCK_NUMEL = 1 << 14  # of a quantised block, which one program holds in registers
_ARRAYS, _CONSTANTS = 5, 9  # that a sweep takes


def triton_kernels(fallback: KernelTable, device_type: str) -> KernelTable:
    """`fallback` with these kernels in front of it for tensors on `device_type`; `fallback` where they do not run."""
    if (lack := why_not(device_type)) is not None:
        _log.warning("no Triton kernels, torch computes instead: %s", lack)
        return fallback
    kernels = _TritonKernels(fallback, device_type)
    return fallback.replaced(
        f"triton {triton.__version__}",
        {
            CAST: kernels.cast,
            SQUARE_SUMS: kernels.square_sums,
            UPDATE: kernels.update,
            RECORDED_UPDATE: kernels.recorded_update,
            QUANTIZE: kernels.quantize,
            DEQUANTIZE: kernels.dequantize,
        },
    )


@cache
def why_not(device_type: str) -> str | None:
    """The reason why Triton compiles nothing for this device; None where a trial kernel ran."""
    if device_type != "cpu" and not keeps_subnormals(triton.__version__):  # its interpreter rounds as numpy
        return f"Triton {triton.__version__} takes subnormal numbers for zeros"
    try:
        code = torch.tensor([3], dtype=torch.int8, device=device_type)
        scale, out = (torch.ones(1, device=device_type) for _ in range(2))
        _launch(dequantize_blocks, 1, out, code, scale, 1, 1, KIND=PLAIN.value, PACKED=False, BLOCK=16)
        found = out.item()
    except Exception as error:  # a compiler, a linker and a driver are involved, and each raises its own
        return f"{type(error).__name__}: {error}"
    return None if found == 3 else f"a trial gave {found} in place of 3"


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def _pointer(buffer: Buffer) -> torch.Tensor:
    """The tensor to launch kernels with, 16-bit floats as int16."""
    tensor: torch.Tensor = buffer.raw
    return tensor.view(torch.int16) if buffer.dtype in _KINDS else tensor


def _kind(buffer: Buffer) -> int:
    return _KINDS.get(buffer.dtype, PLAIN.value)


def _groups(pieces: Sequence[tuple[int, Buffer]]) -> list[list[tuple[int, Buffer]]]:
    """`pieces` that are not empty in groups for one launch: of one allocation and type, each sum once, in the order of
    their memory."""
    found: dict[tuple[int, DType, int], list[tuple[int, Buffer]]] = {}
    seen: Counter[int] = Counter()
    for index, piece in pieces:
        if piece.numel:
            found.setdefault((piece.raw.untyped_storage().data_ptr(), piece.dtype, seen[index]), []).append(
                (index, piece)
            )
            seen[index] += 1
    return [sorted(group, key=lambda one: int(one[1].raw.storage_offset())) for group in found.values()]


@lru_cache(maxsize=4096)
def _sum_plan(places: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The work of the two kernels of a sum, as int64 on the device: start and length of every block, then index, first
    block and number of blocks of every piece. `places` has index, start and numel of every piece.

    The gradients of a bucket lie in the same places in every step, so that nothing is sent to the device again.
    """
    numels = np.array([numel for _, _, numel in places])
    counts = -(-numels // _SUM_BLOCK_NUMEL)
    firsts = np.cumsum(counts) - counts
    piece = np.repeat(np.arange(len(places)), counts)
    offsets = (np.arange(counts.sum()) - firsts[piece]) * _SUM_BLOCK_NUMEL
    starts = np.array([start for _, start, _ in places])[piece] + offsets
    lengths = np.minimum(numels[piece] - offsets, _SUM_BLOCK_NUMEL)
    indices = np.array([index for index, _, _ in places])
    parts = [starts, lengths, indices, firsts, counts]
    plan = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
    return torch.split(plan, [len(part) for part in parts])


class _TritonKernels(FusedKernels):
    """The kernels as methods; each has the signature of its op."""

    def __init__(self, fallback: KernelTable, device_type: str) -> None:
        super().__init__(fallback)
        self._device_type = device_type

    def _is_here(self, buffer: Buffer) -> bool:
        return buffer.device.type == self._device_type

    def _has(self, formula: Formula) -> bool:
        return formula.name in SWEEPS

    def _fits(self, buffers: Sequence[Buffer | None]) -> bool:
        return all(b is None or (b.dtype in COMPUTED_IN_FLOAT32 and self._is_here(b)) for b in buffers)

    def _sweep(
        self,
        name: str,
        arrays: Sequence[Buffer],
        out: Buffer | None,
        constants: Sequence[float],
        rounding: StochasticRounding | None,
    ) -> None:
        weights = arrays[0]
        if not weights.numel:
            return
        *constants, factor = constants or (1.0,)
        absent = _ARRAYS - len(arrays)
        nothing = _pointer(weights)  # in place of what a call has not: a pointer that is not followed
        low, high = (0, 0) if rounding is None else map(signed, halves(rounding.key))
        _launch(
            sweep,
            triton.cdiv(weights.numel, _BLOCK_NUMEL),
            *(*map(_pointer, arrays), *[nothing] * absent),
            nothing if out is None else _pointer(out),
            *(weights.numel, low, high, 0 if rounding is None else signed(rounding.start)),
            *(*map(float, constants), *[0.0] * (_CONSTANTS - len(constants)), float(factor)),
            *(name, *map(_kind, arrays), *[NOTHING.value] * absent),
            NOTHING.value if out is None else _kind(out),
            rounding is not None,
            _BLOCK_NUMEL,
        )

    def recorded_update(
        self,
        formula: Formula,
        constants: Sequence[float | None],
        numbers: Buffer,
        master: Buffer,
        grad: Buffer,
        states: Sequence[Buffer],
        out: Buffer | None = None,
    ) -> None:
        """See `RecordedUpdateFn`. Constants that are given are among the numbers too."""
        arrays = (master, grad, *states)
        if not (self._has(formula) and self._fits((*arrays, out))):
            self._fallback[RECORDED_UPDATE](formula, constants, numbers, master, grad, states, out)
            return
        rule = Rule(formula, {})
        rule.check(master, grad, states, out)
        if master.numel:
            absent = _ARRAYS - len(arrays)
            nothing = _pointer(master)
            _launch(
                recorded_sweep,
                triton.cdiv(master.numel, _BLOCK_NUMEL),
                *(*map(_pointer, arrays), *[nothing] * absent),
                nothing if out is None else _pointer(out),
                *(master.numel, numbers.raw),
                *(formula.name, *map(_kind, arrays), *[NOTHING.value] * absent),
                NOTHING.value if out is None else _kind(out),
                *(len(constants), _BLOCK_NUMEL),
            )
        rule.bump_version(master, states, out)

    def square_sums(self, out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """See `SquareSumsFn`. What a piece adds depends on its contents only."""
        if out.dtype is not DType.FLOAT64 or not all(p.dtype.is_floating and self._is_here(p) for _, p in pieces):
            self._fallback[SQUARE_SUMS](out, pieces)
            return
        for index, piece in pieces:
            if not 0 <= index < out.numel:
                raise ShardingError(f"{out!r} has no place {index} for the sum of {piece!r}", value=index)
        for group in _groups(pieces):
            base, kind = group[0][1], _kind(group[0][1])
            origin: int = base.raw.storage_offset()
            places = tuple((index, piece.raw.storage_offset() - origin, piece.numel) for index, piece in group)
            starts, lengths, indices, firsts, counts = _sum_plan(places, base.raw.device)
            partials = torch.empty(starts.numel(), dtype=torch.float64, device=base.raw.device)
            constants = {"KIND": kind, "BLOCK": _SUM_BLOCK_NUMEL}
            _launch(partial_square_sums, starts.numel(), _pointer(base), starts, lengths, partials, **constants)
            _launch(add_up, len(places), partials, out.raw, indices, firsts, counts)
        out.bump_version()

    def quantize(self, source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `QuantizeFn`."""
        if not self._fits((source,)) or block_numel > _MOST_BLOCK_NUMEL:
            self._fallback[QUANTIZE](source, codes, scales, block_numel)
            return
        bits = code_bits(source, codes, scales, block_numel)
        if source.numel:
            constants = {"KIND": _kind(source), "PACKED": bits == 4, "BLOCK": triton.next_power_of_2(block_numel)}
            arguments = (_pointer(source), codes.raw, scales.raw, source.numel, block_numel, float(LARGEST_CODE[bits]))
            _launch(quantize_blocks, scales.numel, *arguments, **constants)
        codes.bump_version()
        scales.bump_version()

    def dequantize(self, out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `DequantizeFn`."""
        if not self._fits((out,)):
            self._fallback[DEQUANTIZE](out, codes, scales, block_numel)
            return
        bits = code_bits(out, codes, scales, block_numel)
        if out.numel:
            constants = {"KIND": _kind(out), "PACKED": bits == 4, "BLOCK": _BLOCK_NUMEL}
            arguments = (_pointer(out), codes.raw, scales.raw, out.numel, block_numel)
            _launch(dequantize_blocks, triton.cdiv(out.numel, _BLOCK_NUMEL), *arguments, **constants)
        out.bump_version()
