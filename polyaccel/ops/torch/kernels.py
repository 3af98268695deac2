"""Kernels of the ops on torch tensors, on any device that torch supports.

[Note: Chunked optimizer sweep]
An optimizer step is one sweep over the slice in chunks that stay in cache. Where everything has the computing type
already, a chunk is updated in place; otherwise (16-bit gradients, a gradient scale, 16-bit states) it is staged in
scratch tensors, so that unscaling, casting and writing the parameters cost no extra pass over memory.

[Note: Rounding in torch kernels]
See also [Note: Slice-independent rounding] in `polyaccel.ops.base`. torch's vectorised loops fuse multiply and add
where their scalar tails may not, so a multi-element expression could round differently near the end of a slice or of a
thread's share. Hence: operations here round once (multiply, add, divide, square root; never `addcmul`, `lerp`,
`add(alpha)`), and the fused Adam, which does fuse, is given only whole vectors: its tail is staged in padded scratch.
Its threads share out whole cache lines, so their number does not matter either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.ops.base import (
    LARGEST_CODE,
    Formula,
    KernelTable,
    Rule,
    StochasticRounding,
    by_op,
    code_bits,
)
from polyaccel.ops.optimizers import ADAM, ADAMW
from polyaccel.ops.recorded import RECORDED_UPDATE
from polyaccel.ops.torch.block_codes import BLOCK_CODE_KERNELS
from polyaccel.ops.torch.rounding import write_weights
from polyaccel.ops.torch.rows import ROW_KERNELS

# Measured on one core at 16 M elements, fp32: smaller chunks are bound by the calls, larger ones leave the cache. Other
# devices have no such cache but do have launch costs; there a chunk only bounds the scratch memory.
_HOST_CHUNK_NUMEL = 1 << 18
_DEVICE_CHUNK_NUMEL = 1 << 24

_VECTOR_NUMEL = 16  # float32 elements in the widest vector register, and in a cache line
_FUSED_ADAM_DEVICE = "cpu"
"""On an H100 torch's fused Adam gives NaN where infinities are in states and gradients: it blends them by `lerp`."""


def torch_kernels() -> KernelTable:
    """Return the table of these kernels."""
    dense = by_op(combine, scale, cast, square_sums, update, quantize, dequantize)
    return KernelTable("torch", {**dense, **ROW_KERNELS, **BLOCK_CODE_KERNELS, RECORDED_UPDATE: recorded_update})


def _chunk_numel(tensor: Tensor) -> int:
    return _HOST_CHUNK_NUMEL if tensor.device.type == "cpu" else _DEVICE_CHUNK_NUMEL


def _computing_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


class _Scratch:
    """Temporaries of one kernel call, allocated once and reused by every chunk, and `ArrayMath` that computes in them.

    Allocated in each chunk they cost more than the arithmetic: the allocator gives a megabyte back to the system, and
    its pages fault in again. Kept longer than a call they would be shared by threads or streams.
    """

    def __init__(self, like: Tensor) -> None:
        self._device = like.device
        self._slots: dict[str, Tensor] = {}

    def take(self, slot: str, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements with any contents; the same memory for every call with the same `slot`."""
        held = self._slots.get(slot)
        if held is None or held.numel() < numel:
            held = self._slots[slot] = torch.empty(numel, dtype=dtype, device=self._device)
        return held[:numel]

    def _like(self, slot: str, tensor: Tensor) -> Tensor:
        return self.take(slot, tensor.numel(), tensor.dtype)

    def mul(self, a: Tensor, b: Any, slot: int = 0) -> Tensor:
        return torch.mul(a, b, out=self._like(f"slot {slot}", a))

    def sqrt(self, a: Tensor, slot: int = 0) -> Tensor:
        return torch.sqrt(a, out=self._like(f"slot {slot}", a))

    def abs(self, a: Tensor, slot: int = 0) -> Tensor:
        return torch.abs(a, out=self._like(f"slot {slot}", a))

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b, out=a)

    def sign(self, a: Tensor) -> Tensor:
        # torch calls the sign of NaN 0, which would freeze the parameter in silence.
        return torch.where(a.isnan(), a, torch.sign(a, out=self._like("slot 0", a)), out=a)

    def plus_decay(self, a: Tensor, weights: Tensor, decay: float | Tensor) -> Tensor:
        if not isinstance(decay, Tensor) and not decay:
            return a
        return a.add_(torch.mul(weights, decay, out=self._like("decay", weights)))

    def choose(self, condition: float, a: Tensor, b: Tensor) -> Tensor:
        return a if condition else b


def combine(target: Buffer, source: Buffer, op: ReduceOp) -> None:
    """Implement `ReduceFn`. `source` is converted to `target`'s type first."""
    ours: Tensor = target.raw
    for mine, theirs in zip(
        torch.split(ours, _chunk_numel(ours)), torch.split(source.raw, _chunk_numel(ours)), strict=True
    ):
        other = theirs.to(mine.dtype)
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            mine.add_(other)
        elif op is ReduceOp.MAX:
            torch.maximum(mine, other, out=mine)
        elif op is ReduceOp.MIN:
            torch.minimum(mine, other, out=mine)
        else:
            mine.mul_(other)
    target.bump_version()


def scale(target: Buffer, factor: float) -> None:
    """Implement `ScaleFn`. Raises ShardingError for integers, which a factor would round in silence."""
    if not target.dtype.is_floating:
        raise ShardingError(f"cannot scale {target!r}", hint="scale a floating element type", value=target.dtype.value)
    target.raw.mul_(factor)
    target.bump_version()


def cast(source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
    """Implement `CastFn`. Raises ShardingError for buffers of different lengths."""
    if source.numel != out.numel:
        raise ShardingError(f"{out!r} does not match {source!r}", value=out.numel)
    step = max(out.numel, 1) if rounding is None else _chunk_numel(out.raw)
    for start in range(0, out.numel, step):
        here = rounding and rounding.at(start)
        write_weights(out.raw[start : start + step], source.raw[start : start + step], here)
    out.bump_version()


def square_sums(out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
    """Implement `SquareSumsFn`: torch's pairwise sum in chunks, within a few units in the last place of float64."""
    totals: Tensor = out.raw
    scratch = _Scratch(totals)
    for index, piece in pieces:
        values: Tensor = piece.raw
        for chunk in torch.split(values, _chunk_numel(values)):
            wide = scratch.take("wide", chunk.numel(), totals.dtype).copy_(chunk)
            totals[index].add_(wide.mul_(wide).sum())
    out.bump_version()


_Formula = Callable[..., tuple[Tensor, ...]]  # (scratch, master, gradient, states) -> (master, states)
_GRAD = 1  # where the gradient stands among the tensors of a sweep: behind the master weights, before the states


def update(
    rule: Rule,
    master: Buffer,
    grad: Buffer,
    states: Sequence[Buffer],
    out: Buffer | None = None,
    grad_scale: float = 1.0,
    rounding: StochasticRounding | None = None,
) -> None:
    """Implement `UpdateFn`: torch's fused Adam on the host, else the formula in separate operations."""
    rule.check(master, grad, states, out)
    if rule.formula in (ADAMW, ADAM) and master.raw.device.type == _FUSED_ADAM_DEVICE:
        _sweep(rule, _fused_adam(rule), master, grad, states, out, grad_scale, rounding, is_vector_kernel=True)
    else:
        apply = partial(_in_steps, rule.formula, rule.constants)
        _sweep(rule, apply, master, grad, states, out, grad_scale, rounding)


def recorded_update(
    formula: Formula,
    constants: Sequence[float | None],
    numbers: Buffer,
    master: Buffer,
    grad: Buffer,
    states: Sequence[Buffer],
    out: Buffer | None = None,
) -> None:
    """Implement `RecordedUpdateFn`: the formula in separate operations on numbers that are tensors without a size."""
    rule = Rule(formula, {})
    rule.check(master, grad, states, out)
    places = numbers.raw.to(_computing_dtype(master.raw)).unbind()
    read = [places[at] if constant is None else constant for at, constant in enumerate(constants)]
    _sweep(rule, partial(_in_steps, formula, read), master, grad, states, out, places[-1], None)


def _sweep(
    rule: Rule,
    apply: _Formula,
    master: Buffer,
    grad: Buffer,
    states: Sequence[Buffer],
    out: Buffer | None,
    grad_scale: float | Tensor,
    rounding: StochasticRounding | None,
    *,
    is_vector_kernel: bool = False,
) -> None:
    """Run `apply` over the buffers in chunks. `is_vector_kernel`: it takes whole vectors, and leaves the gradient."""
    whole_vectors, owned_grad = is_vector_kernel, not is_vector_kernel
    tensors: list[Tensor] = [master.raw, grad.raw, *(state.raw for state in states)]
    read_count = 2 + len(rule.formula.reads)
    compute = _computing_dtype(tensors[0])
    scratch = _Scratch(tensors[0])
    in_place = not owned_grad and out is None and _is_one(grad_scale) and all(t.dtype is compute for t in tensors)

    end = master.numel
    body = end - end % _VECTOR_NUMEL if whole_vectors else end
    step = max(body, 1) if in_place else _chunk_numel(tensors[0])
    bounds = [(start, min(start + step, body)) for start in range(0, body, step)]
    if body < end:
        bounds.append((body, end))

    for start, stop in bounds:
        numel = _VECTOR_NUMEL if start == body else stop - start
        pieces = [tensor[start:stop] for tensor in tensors]
        staged = [
            piece
            if piece.dtype is compute and piece.numel() == numel and (i != _GRAD or in_place)
            else _stage(piece, scratch.take(f"staged {i}", numel, compute), grad_scale if i == _GRAD else 1)
            for i, piece in enumerate(pieces[:read_count])
        ]
        results = apply(scratch, *staged)
        here = rounding and rounding.at(start)
        del pieces[_GRAD]
        for i, (piece, result) in enumerate(zip(pieces, results, strict=True)):
            if result is not piece and (i or rule.formula.writes_weights):
                write_weights(piece, result[: stop - start], None if i else here)
        if out is not None:
            write_weights(out.raw[start:stop], results[0][: stop - start], here)
    rule.bump_version(master, states, out)


def _in_steps(formula: Formula, constants: Sequence[Any], scratch: _Scratch, *tensors: Tensor) -> tuple[Tensor, ...]:
    return formula.arrays(scratch, constants, *tensors)


def _is_one(factor: float | Tensor) -> bool:
    """Whether nothing is multiplied. A number in memory of the device is not looked at."""
    return not isinstance(factor, Tensor) and factor == 1


def _stage(piece: Tensor, room: Tensor, factor: float | Tensor) -> Tensor:
    """Fill `room` with `piece * factor` in `room`'s type; where it is longer, its contents do not matter."""
    filled = room[: piece.numel()]
    if _is_one(factor):
        filled.copy_(piece)
    elif piece.dtype is room.dtype:
        torch.mul(piece, factor, out=filled)
    else:
        filled.copy_(piece).mul_(factor)
    return room


def _fused_adam(rule: Rule) -> _Formula:
    """torch's own kernel in the place of the formula's operations. It leaves the gradient as it is."""
    settings = rule.settings
    fused = torch._fused_adamw_ if rule.formula is ADAMW else torch._fused_adam_
    # The kernel derives both corrections from the step: beta ** inf is 0, which is "no correction".
    number = rule.step if settings["bias_correction"] else math.inf
    step = torch.full((), number, dtype=torch.float32)

    def apply(scratch: _Scratch, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        fused(
            *([p], [g], [m], [v], [], [step]),
            lr=settings["lr"],
            beta1=settings["beta1"],
            beta2=settings["beta2"],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            amsgrad=False,
            maximize=False,
        )
        return p, m, v

    return apply


def quantize(source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """Implement `QuantizeFn`."""
    bits = code_bits(source, codes, scales, block_numel)
    if source.numel:
        blocks = _blocks(source.raw.float(), block_numel)
        largest = blocks.abs().amax(dim=1)  # NaN if there is one
        scale = torch.where(largest.isfinite(), largest / LARGEST_CODE[bits], torch.nan)
        rounded = blocks.div_(torch.where(scale > 0, scale, torch.nan).unsqueeze(1)).round_()
        values = rounded.nan_to_num_(0.0).clamp_(-LARGEST_CODE[bits], LARGEST_CODE[bits]).to(torch.int8).view(-1)
        scales.raw.copy_(scale)
        if bits == 8:
            codes.raw.copy_(values[: source.numel])
        else:
            pairs = (values[: 2 * codes.numel].view(torch.uint8) & 15).view(-1, 2)
            codes.raw.copy_(pairs[:, 0] | pairs[:, 1] << 4)
    codes.bump_version()
    scales.bump_version()


def dequantize(out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """Implement `DequantizeFn`."""
    values: Tensor = codes.raw
    if code_bits(out, codes, scales, block_numel) == 4:
        pairs = torch.stack((values & 15, values >> 4), dim=1).view(-1)[: out.numel]
        values = (pairs ^ 8).to(torch.int8) - 8
    if out.numel:
        blocks = _blocks(values.float(), block_numel).mul_(scales.raw.unsqueeze(1))
        out.raw.copy_(blocks.view(-1)[: out.numel])
    out.bump_version()


def _blocks(values: Tensor, block_numel: int) -> Tensor:
    """A copy of shape (blocks, block_numel), the last block filled up with zeros."""
    missing = -values.numel() % block_numel
    return torch.cat((values, values.new_zeros(missing))).view(-1, block_numel)
