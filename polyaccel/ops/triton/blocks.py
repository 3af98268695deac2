"""Triton kernels that sum or quantise blocks of numbers. See `SquareSumsFn`, `QuantizeFn` and `DequantizeFn`."""

from __future__ import annotations

import triton
import triton.language as tl

from polyaccel.ops.triton.numbers import load, store

SUMMED = tl.constexpr(1024)
"""How many partial sums `add_up` takes at a time."""


@triton.jit
def partial_square_sums(base, starts, counts, partials, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """`partials[i]` (float64) is the sum of the squares of `counts[i]` elements, at most BLOCK, from `starts[i]`."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    wide = load(base, tl.load(starts + block) + lane, lane < tl.load(counts + block), KIND).to(tl.float64)
    tl.store(partials + block, tl.sum(wide * wide, axis=0))


@triton.jit
def add_up(partials, out, indices, firsts, counts):
    """`out[indices[i]]` grows by `counts[i]` partial sums from `firsts[i]`, in one program, so always in one order."""
    piece = tl.program_id(0).to(tl.int64)
    first, count, index = tl.load(firsts + piece), tl.load(counts + piece), tl.load(indices + piece)
    total = tl.zeros([SUMMED], tl.float64)
    start = count * 0
    while start < count:  # Triton's interpreter takes no loaded number as the end of a range
        at = start + tl.arange(0, SUMMED)
        total += tl.load(partials + first + at, mask=at < count, other=0.0)
        start += SUMMED
    tl.store(out + index, tl.load(out + index) + tl.sum(total, axis=0))


@triton.jit
def quantize_blocks(
    source, codes, scales, numel, block_numel, most, KIND: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr
):
    """One block a program. With PACKED two codes share a byte; BLOCK is a power of two not below `block_numel`."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    at = block * block_numel + lane
    # The largest magnitude by its bits, in whose order NaN is beyond infinity instead of nowhere.
    here = load(source, at, (lane < block_numel) & (at < numel), KIND)
    largest = tl.max(here.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    scale = tl.where(largest < 0x7F800000, tl.div_rn(largest.to(tl.float32, bitcast=True), most), float("nan"))
    tl.store(scales + block, scale)
    if PACKED:
        byte = tl.arange(0, BLOCK // 2)
        low = block * block_numel + 2 * byte
        inside = 2 * byte < block_numel
        first = _codes(load(source, low, inside & (low < numel), KIND), scale, most)
        second = _codes(load(source, low + 1, inside & (low + 1 < numel), KIND), scale, most)
        both = (first & 15) | ((second & 15) << 4)
        tl.store(codes + (low // 2), both.to(tl.uint8), mask=inside & (low < numel))
    else:
        tl.store(codes + at, _codes(here, scale, most).to(tl.int8), mask=(lane < block_numel) & (at < numel))


@triton.jit
def _codes(values, scale, most):
    """int32 codes: the quotient to nearest even, 0 where there is no scale."""
    quotient = tl.div_rn(values, tl.where(scale > 0, scale, 1.0))
    # Near 1.5 * 2**23 the last place of a float32 is 1, so that the sum rounds to a whole number.
    nearest = (quotient + 12582912.0) - 12582912.0
    clipped = tl.minimum(tl.maximum(nearest, -most), most)
    return tl.where(scale > 0, clipped, 0.0).to(tl.int32)


@triton.jit
def dequantize_blocks(
    out, codes, scales, numel, block_numel, KIND: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr
):
    """`numel` elements, BLOCK a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    if PACKED:
        byte = tl.load(codes + at // 2, mask=mask, other=0).to(tl.int32)
        code = (((byte >> ((at % 2).to(tl.int32) * 4)) & 15) ^ 8) - 8
    else:
        code = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scales + at // block_numel, mask=mask, other=0.0)
    store(out, at, mask, code.to(tl.float32) * scale, at, KIND, False)
