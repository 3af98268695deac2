"""The checks of the kernels' contract: every op against its float64 meaning, and its independence of slices.

`check_meaning` runs one case of `polyaccel.testkit.kernels.cases` on random, empty, odd or non-finite data;
`check_slices` runs it on a whole buffer and on pieces of that buffer and compares the bits;
`check_stochastic_rounding` checks the weights that it writes; `check_square_sums`, `check_quantization` and
`check_matrix_products` check the ops that are not elementwise. A failed check raises AssertionError with the name of
the case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.ops import reference
from polyaccel.ops.base import (
    DEQUANTIZE,
    LINEAR,
    LINEAR_INPUT_GRAD,
    LINEAR_WEIGHT_GRAD,
    MATMUL,
    MATMUL_LEFT_GRAD,
    MATMUL_RIGHT_GRAD,
    QUANTIZE,
    SQUARE_SUMS,
    KernelTable,
    Op,
    StochasticRounding,
)
from polyaccel.ops.reference import Float64s
from polyaccel.ops.rounding import random_bits
from polyaccel.testkit.comparison import equal, same_numbers
from polyaccel.testkit.kernels.cases import KernelCase
from polyaccel.testkit.progress import doing

_EPSILON = {DType.FLOAT64: 2.0**-52, DType.FLOAT32: 2.0**-23, DType.BFLOAT16: 2.0**-7, DType.FLOAT16: 2.0**-10}
_SMALLEST = 2.0**-24  # of float16, below which its spacing is no longer relative
_LARGEST = 64  # what values that are about 1 come to on the way, divided by small ones
_ROUNDINGS = 4  # the most roundings that a kernel may make on the way to a value


def check_meaning(
    accelerator: Accelerator, case: KernelCase, numel: int, *, finite: bool = True, offset: int = 0, seed: int = 0
) -> None:
    """Run `case` on `numel` random elements, with NaN and infinities among them unless `finite`.

    With an `offset` buffers start that many elements behind the start of their allocations, each one element further
    than the one before: few are aligned, and no two in the same way.
    """
    doing(f"{case}, {numel} elements")
    starts = [offset + position if offset else 0 for position in range(len(case.arguments))]
    whole = _filled(accelerator, case, max(starts) + numel + offset, finite=finite, seed=seed)
    buffers = [buffer.view(start, numel) for start, buffer in zip(starts, whole, strict=True)]
    outside = [_outside(buffer, start, numel) for start, buffer in zip(starts, whole, strict=True)]
    generations = [buffer.version for buffer in buffers]
    with np.errstate(all="ignore"):
        expected = case.meaning([_contents(buffer) for buffer in buffers])
    case.call(accelerator.kernels(), buffers)

    # The arithmetic is in float64 if the master weights are, else in float32 whatever the other types.
    computing = _EPSILON[DType.FLOAT64 if case.arguments[0].dtype is DType.FLOAT64 else DType.FLOAT32]
    for argument, buffer, values, generation in zip(case.arguments, buffers, expected, generations, strict=True):
        if argument.role == "out":
            _check_rounding(case, buffers[0], buffer)
        if values is not None:
            # Absolute as well: a value near zero is a difference of larger ones.
            tolerance = _ROUNDINGS * max(_EPSILON[argument.dtype], computing)
            what = f"{case}, {argument.role}, {numel=}, {offset=}"
            same_numbers(_contents(buffer), values, what, rtol=tolerance, atol=max(tolerance, _LARGEST * computing))
        if argument.written and buffer.version <= generation:
            raise AssertionError(f"{case} wrote {argument.role} without bump_version")
    for argument, start, buffer, before in zip(case.arguments, starts, whole, outside, strict=True):
        equal(_outside(buffer, start, numel), before, f"{case}: what surrounds {argument.role}, {numel=}, {offset=}")


def _outside(buffer: Buffer, start: int, numel: int) -> bytes:
    """The contents of `buffer` before and after a view of it."""
    end = start + numel
    return buffer.view(0, start).to_bytes() + buffer.view(end, buffer.numel - end).to_bytes()


def _check_rounding(case: KernelCase, master: Buffer, out: Buffer) -> None:
    """`out` is `master` rounded to nearest in `out`'s type: at most half a unit in the last place away."""
    half = _EPSILON[out.dtype] / 2
    with np.errstate(all="ignore"):
        what = f"{case}: out is not master rounded"
        same_numbers(_contents(out), _contents(master), what, rtol=half, atol=_SMALLEST)


def check_slices(accelerator: Accelerator, case: KernelCase, numel: int, cuts: Sequence[int], *, seed: int = 0) -> None:
    """`case` on a whole buffer gives the same bits as on its pieces, cut at `cuts` (ascending, inside [0, numel])."""
    doing(f"{case}, in slices")
    whole = _filled(accelerator, case, numel, finite=True, seed=seed)
    parts = _filled(accelerator, case, numel, finite=True, seed=seed)
    case.call(accelerator.kernels(), whole)
    for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
        case.call(accelerator.kernels(), [buffer.view(start, stop - start) for buffer in parts])
    for argument, one, other in zip(case.arguments, whole, parts, strict=True):
        if argument.role != "grad" and one.to_bytes() != other.to_bytes():
            what = f"{case}: {argument.role} when cut at {list(cuts)}, against the whole"
            same_numbers(_contents(other), _contents(one), what)
            raise AssertionError(f"{what}: zeros or NaN of other bits")


@np.errstate(all="ignore")
def check_stochastic_rounding(
    accelerator: Accelerator, case: KernelCase, numel: int, cuts: Sequence[int] = (), *, seed: int = 0
) -> None:
    """Stochastic rounding changes 16-bit weights only, and gives the reference's values, cut at `cuts` too.

    Sources have random bits: infinities, NaN, and numbers at both ends of the range are among them. Master weights are
    tried in each type. Returns at once for an op that writes no weights.
    """
    if case.call_rounding is None:
        return
    doing(f"{case}, rounded stochastically")
    # Indices pass 2**32 on the way, where they start again.
    rounding = StochasticRounding(key=0xFEDC_BA98_7654_3210 + seed, start=(1 << 32) - numel // 2)
    random = random_bits(rounding.key, rounding.start, numel)
    halves = {DType.BFLOAT16, DType.FLOAT16} & accelerator.supported_dtypes()
    weights = case.arguments[0].role == "master" and case.arguments[0].dtype is DType.FLOAT32
    for narrow in (None, *(sorted(halves, key=lambda dtype: dtype.value) if weights else ())):
        plain, rounded = (_filled(accelerator, case, numel, finite=True, seed=seed) for _ in range(2))
        if case.arguments[0].role == "source":
            bits = np.random.default_rng(seed).integers(0, 256, numel * case.arguments[0].dtype.itemsize, np.uint8)
            plain[0].from_bytes(bits.tobytes())
            rounded[0].copy_from(plain[0])
        if narrow is not None:
            rounded[0] = accelerator.allocate(numel, narrow)
            rounded[0].copy_from(plain[0])
            plain[0].copy_from(rounded[0])
        case.call(accelerator.kernels(), plain)
        for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
            views = [buffer.view(start, stop - start) for buffer in rounded]
            case.call_rounding(accelerator.kernels(), views, rounding.at(start))
        for position, (argument, buffer) in enumerate(zip(case.arguments, rounded, strict=True)):
            if argument.role == "grad":
                continue
            wanted = _contents(plain[0 if argument.role == "out" else position])
            if buffer.dtype in halves and (argument.role == "out" or (position == 0 and argument.written)):
                single = wanted.astype(np.float32).astype(np.float64)
                wanted = reference.round_stochastically(single, buffer.dtype, random)
            elif argument.role == "out":
                wanted = _contents(plain[position])
            what = f"{case}, {argument.role} in {buffer.dtype.value}, rounded stochastically, {numel=}"
            same_numbers(_contents(buffer), wanted, what)


def check_square_sums(accelerator: Accelerator, dtype: DType, numel: int, *, seed: int = 0) -> None:
    """Sums of squares of pieces of several lengths equal float64's, are added at their index, and pass on NaN."""
    doing(f"sums of squares, {numel} x {dtype.value}")
    wide = DType.FLOAT64 if DType.FLOAT64 in accelerator.supported_dtypes() else DType.FLOAT32
    out = accelerator.allocate(3, wide)
    out.fill(1.0)
    values = np.random.default_rng(seed).standard_normal(numel) * 3
    piece = accelerator.allocate(numel, dtype)
    piece.from_bytes(encode(values, dtype))
    half = numel // 2
    kernel = accelerator.kernels()[SQUARE_SUMS]
    kernel(out, [(2, piece), (0, piece.view(0, half)), (0, piece.view(half, numel - half))])
    total = 1.0 + reference.square_sum(_contents(piece))
    tolerance = _ROUNDINGS * _EPSILON[wide]
    same_numbers(_contents(out), [total, 1.0, total], f"square_sums of {numel} x {dtype.value}", rtol=tolerance)

    # What decides on overflow: a single NaN or infinity is seen, and squares beyond float32 are not taken for one.
    for planted, found in ((np.nan, np.isnan), (np.inf, np.isposinf), (-np.inf, np.isposinf)):
        if numel:
            values[numel // 3] = planted
            piece.from_bytes(encode(values, dtype))
            out.fill(0.0)
            kernel(out, [(1, piece)])
            if not found(_contents(out)[1]):
                expected = "nan" if np.isnan(planted) else "inf"
                what = f"square_sums of {planted} among {numel} x {dtype.value}"
                raise AssertionError(f"{what}: expected {expected}, got {_contents(out)[1]}")
    if wide is DType.FLOAT64 and dtype is DType.FLOAT32 and numel:
        piece.fill(1e30)
        out.fill(0.0)
        kernel(out, [(0, piece)])
        expected_sum = numel * np.float64(np.float32(1e30)) ** 2
        same_numbers(_contents(out)[0], expected_sum, f"square_sums of {numel} times 1e30", rtol=tolerance)


def check_quantization(accelerator: Accelerator, dtype: DType, numel: int, block_numel: int, bits: int) -> None:
    """Codes and scales equal the reference's, except where two codes are equally near, and dequantise to their
    meaning."""
    doing(f"quantisation to {bits} bits, {numel} x {dtype.value}")
    table = accelerator.kernels()
    values = np.random.default_rng(numel).standard_normal(numel) * 3
    values[:block_numel] = 0
    spoilt = numel - 1 - (numel - 1) % block_numel  # where the last block starts
    if spoilt > block_numel:
        values[spoilt] = np.inf
    source, back = _unaligned(accelerator, 1, numel, dtype), _unaligned(accelerator, 2, numel, dtype)
    source.from_bytes(encode(values, dtype))
    codes = _unaligned(accelerator, 3, numel if bits == 8 else -(-numel // 2), DType.INT8 if bits == 8 else DType.UINT8)
    scales = _unaligned(accelerator, 1, -(-numel // block_numel), DType.FLOAT32)
    table[QUANTIZE](source, codes, scales, block_numel)
    table[DEQUANTIZE](back, codes, scales, block_numel)

    what = f"{dtype.value}, {numel=}, {block_numel=}, {bits=}"
    with np.errstate(all="ignore"):
        expected, expected_scales = reference.quantize(_contents(source), block_numel, bits)
    same_numbers(_contents(scales), expected_scales, f"scales, {what}", rtol=_EPSILON[DType.FLOAT32])
    stored = _contents(codes)
    if bits == 4:
        pairs = np.stack((stored % 16, stored // 16), axis=1).reshape(-1)[:numel]
        stored = np.where(pairs > 7, pairs - 16, pairs)
    # A quotient next to the middle of two codes may round to either; a thousandth of them is more than chance allows.
    same_numbers(stored, expected, f"codes, {what}", atol=1)
    if np.count_nonzero(stored != expected) > numel // 1000:
        same_numbers(stored, expected, f"codes, {what}")
    meant = reference.dequantize(stored, _contents(scales), block_numel)
    same_numbers(_contents(back), meant, f"dequantised, {what}", rtol=2 * _EPSILON[dtype], atol=_SMALLEST)


def check_matrix_products(
    accelerator: Accelerator, table: KernelTable, rows: int, inputs: int, outputs: int, *, seed: int = 0
) -> None:
    """The matrix products that `table` has, at least one, equal the reference's, with NaN where that has NaN."""
    doing(f"matrix products of {rows} x {inputs} and {inputs} x {outputs}")
    draw = np.random.default_rng(seed)
    shapes = {
        "x": (rows, inputs),
        "weight": (outputs, inputs),
        "bias": (outputs,),
        "grad": (rows, outputs),
        "right": (inputs, outputs),
    }
    arrays, exact = {}, {}
    for name, shape in shapes.items():
        values = draw.standard_normal(shape)
        if name in ("x", "grad"):
            values[-1, -1] = np.nan
        buffer = accelerator.allocate(values.size, DType.FLOAT32)
        buffer.from_bytes(encode(values.reshape(-1), DType.FLOAT32))
        arrays[name], exact[name] = buffer.raw.reshape(shape), _contents(buffer).reshape(shape)
    calls: tuple[tuple[Op[Any], Any, tuple[str, ...]], ...] = (
        (LINEAR, reference.linear, ("x", "weight", "bias")),
        (LINEAR, lambda x, weight: reference.linear(x, weight, None), ("x", "weight")),
        (LINEAR_INPUT_GRAD, reference.linear_input_grad, ("grad", "weight")),
        (LINEAR_WEIGHT_GRAD, reference.linear_weight_grad, ("grad", "x")),
        (MATMUL, reference.matmul, ("x", "right")),
        (MATMUL_LEFT_GRAD, reference.matmul_left_grad, ("grad", "right")),
        (MATMUL_RIGHT_GRAD, reference.matmul_right_grad, ("x", "grad")),
    )
    for op, meaning, names in calls:
        if op in table:
            given = [arrays[name] for name in names]
            found = table[op](*given, *([None] if op is LINEAR and "bias" not in names else []))
            expected = meaning(*(exact[name] for name in names))
            # How far rounding may be off grows with what is summed, not with a sum that cancels.
            room = _ROUNDINGS * _EPSILON[DType.FLOAT32] * meaning(*(np.abs(exact[name]) for name in names))
            what = f"{op.name}, {rows=}, {inputs=}, {outputs=}"
            equal(tuple(found.shape), expected.shape, f"{what}, shape")
            got = _contents(accelerator.wrap(found)).reshape(expected.shape)
            same_numbers(np.isnan(got), np.isnan(expected), f"{what}: where NaN is")
            off = np.abs(got - expected)
            if np.any(off > room):
                at = np.unravel_index(np.nanargmax(off / room), off.shape)
                place = tuple(int(index) for index in at)
                raise AssertionError(
                    f"{what}: expected {expected[at]:.9g}, got {got[at]:.9g} at element {place}; "
                    f"off by {(off / room)[at]:.1f} times what rounding explains"
                )


def encode(values: Float64s, dtype: DType) -> bytes:
    """`values` as the bytes of `dtype`; bfloat16 by cutting off the low half of a float32."""
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype.value).tobytes()


def _unaligned(accelerator: Accelerator, start: int, numel: int, dtype: DType) -> Buffer:
    """Zeros that begin `start` elements behind the start of their allocation."""
    return accelerator.allocate(start + numel, dtype).view(start, numel)


def _contents(buffer: Buffer) -> Float64s:
    return reference.to_float64(buffer.to_bytes(), buffer.dtype)


def _filled(accelerator: Accelerator, case: KernelCase, numel: int, *, finite: bool, seed: int) -> list[Buffer]:
    draw = np.random.default_rng(seed)
    buffers = []
    for argument in case.arguments:
        values = draw.standard_normal(numel)
        if argument.role == "magnitude":
            values = np.abs(values) + 0.01
        elif not finite and argument.role in ("grad", "source", "target"):
            every = 5 if argument.role == "target" else 7  # so that each is paired with each
            values[::every], values[1::every], values[2::every] = np.nan, np.inf, -np.inf
        buffer = accelerator.allocate(numel, argument.dtype)
        buffer.from_bytes(encode(values, argument.dtype))
        buffers.append(buffer)
    return buffers
