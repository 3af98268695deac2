"""The ops on torch tensors, on any device that torch knows.

[Note: Sweeps]
An optimizer step is one sweep over the slice in chunks that stay in cache. Where everything has the computing type
already, a chunk is updated in place; otherwise (16-bit gradients, a gradient scale, 16-bit states) it is staged in
scratch tensors, so that unscaling, casting and writing the parameters cost no pass over memory of their own.

[Note: Rounding in torch kernels]
See also [Note: Slices and rounding] in `polyaccel.ops.base`. torch's vectorised loops fuse multiply and add where their
scalar tails may not, so a multi-element expression could round differently near the end of a slice or of a thread's
share. Hence: operations here round once (multiply, add, divide, square root; never `addcmul`, `lerp`, `add(alpha)`),
and the fused Adam, which does fuse, is given only whole vectors: its tail is staged in padded scratch. Its threads
share out whole cache lines, so their number does not matter either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

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
from polyaccel.ops.torch_quantization import dequantize, quantize
from polyaccel.ops.torch_rounding import write_weights
from polyaccel.types import ReduceOp

# Measured on one core at 16 M elements, fp32: smaller chunks are bound by the calls, larger ones leave the cache. Other
# devices have no such cache but do have launch costs; there a chunk only bounds the scratch memory.
_HOST_CHUNK_NUMEL = 1 << 18
_DEVICE_CHUNK_NUMEL = 1 << 24

_VECTOR_NUMEL = 16  # float32 elements in the widest vector register, and in a cache line
_FUSED_ADAM_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def torch_kernels() -> KernelTable:
    """The table of these kernels."""
    return KernelTable(
        "torch",
        {
            COMBINE: combine,
            SCALE: scale,
            CAST: cast,
            SQUARE_SUMS: square_sums,
            ADAM: adam,
            SGD: sgd,
            ADAGRAD: adagrad,
            LION: lion,
            LAMB_DIRECTION: lamb_direction,
            LAMB_APPLY: lamb_apply,
            QUANTIZE: quantize,
            DEQUANTIZE: dequantize,
        },
    )


def _chunk_numel(tensor: Tensor) -> int:
    return _HOST_CHUNK_NUMEL if tensor.device.type == "cpu" else _DEVICE_CHUNK_NUMEL


def _computing_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


class _Scratch:
    """Temporaries of one kernel call, allocated once and reused by every chunk.

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

    def like(self, slot: str, tensor: Tensor) -> Tensor:
        return self.take(slot, tensor.numel(), tensor.dtype)


def combine(target: Buffer, source: Buffer, op: ReduceOp) -> None:
    """See `CombineFn`. `source` is converted to `target`'s type first."""
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
    target.mark_written()


def scale(target: Buffer, factor: float) -> None:
    """See `ScaleFn`. Raises ShardingError for integers, which a factor would round in silence."""
    if not target.dtype.is_floating:
        raise ShardingError(f"cannot scale {target!r}", cure="scale a floating element type", value=target.dtype.value)
    target.raw.mul_(factor)
    target.mark_written()


def cast(source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
    """See `CastFn`."""
    if source.numel != out.numel:
        raise ShardingError(f"{out!r} does not match {source!r}", value=out.numel)
    step = max(out.numel, 1) if rounding is None else _chunk_numel(out.raw)
    for start in range(0, out.numel, step):
        here = rounding and rounding.at(start)
        write_weights(out.raw[start : start + step], source.raw[start : start + step], here)
    out.mark_written()


def square_sums(out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
    """See `SquareSumsFn`. torch's pairwise sum in chunks: within a few units in the last place of float64."""
    totals: Tensor = out.raw
    scratch = _Scratch(totals)
    for index, piece in pieces:
        values: Tensor = piece.raw
        for chunk in torch.split(values, _chunk_numel(values)):
            wide = scratch.take("wide", chunk.numel(), totals.dtype).copy_(chunk)
            totals[index].add_(wide.mul_(wide).sum())
    out.mark_written()


_MASTER, _GRAD = 0, 1  # where they stand among the tensors of a sweep; the states follow
_Update = Callable[[Tensor, Tensor, list[Tensor], _Scratch], None]


def _sweep(
    update: _Update,
    master: Buffer,
    grad: Buffer,
    states: Sequence[Buffer],
    out: Buffer | None,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
    *,
    whole_vectors: bool = False,
    owned_grad: bool = True,
) -> None:
    """Call `update(master, grad, states, scratch)` on chunks in the computing type and store what it changed.

    `whole_vectors` pads the last chunk to a multiple of `_VECTOR_NUMEL`. With `owned_grad` the `grad` that `update`
    gets is its own to overwrite, else it may be the caller's. See [Note: Sweeps].
    """
    for other in (grad, *states, *((out,) if out is not None else ())):
        if other.numel != master.numel:
            raise ShardingError(f"{other!r} does not match {master!r}", value=other.numel)
    tensors: list[Tensor] = [master.raw, grad.raw, *(state.raw for state in states)]
    compute = _computing_dtype(tensors[0])
    scratch = _Scratch(tensors[0])
    in_place = grad_scale == 1 and out is None and not owned_grad and all(t.dtype is compute for t in tensors)

    end = master.numel
    body = end - end % _VECTOR_NUMEL if whole_vectors else end
    step = max(body, 1) if in_place else _chunk_numel(tensors[0])
    bounds = [(start, min(start + step, body)) for start in range(0, body, step)]
    if body < end:
        bounds.append((body, end))

    for start, stop in bounds:
        numel = _VECTOR_NUMEL if start == body else stop - start
        pieces = [tensor[start:stop] for tensor in tensors]
        fit = [piece.dtype is compute and piece.numel() == numel for piece in pieces]
        fit[_GRAD] = in_place and fit[_GRAD]
        staged = [
            piece
            if fit[i]
            else _stage(piece, scratch.take(f"staged {i}", numel, compute), grad_scale if i == _GRAD else 1)
            for i, piece in enumerate(pieces)
        ]
        update(staged[_MASTER], staged[_GRAD], staged[_GRAD + 1 :], scratch)
        here = rounding and rounding.at(start)
        for i, (piece, result) in enumerate(zip(pieces, staged, strict=True)):
            if i != _GRAD and not fit[i]:
                write_weights(piece, result[: stop - start], here if i == _MASTER else None)
        if out is not None:
            write_weights(out.raw[start:stop], staged[_MASTER][: stop - start], here)

    for written in (master, *states, *((out,) if out is not None else ())):
        written.mark_written()


def _stage(piece: Tensor, room: Tensor, factor: float) -> Tensor:
    """Fill `room` with `piece * factor` in `room`'s type; where it is longer, its contents do not matter."""
    filled = room[: piece.numel()]
    if factor == 1:
        filled.copy_(piece)
    elif piece.dtype is room.dtype:
        torch.mul(piece, factor, out=filled)
    else:
        filled.copy_(piece).mul_(factor)
    return room


def adam(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    out: Buffer | None,
    hyper: AdamHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `AdamFn`: torch's fused kernel where the device has it, else the same formula in separate operations."""
    device = master.raw.device
    if device.type not in _FUSED_ADAM_DEVICES:
        _sweep(partial(_adam_in_steps, hyper), master, grad, (exp_avg, exp_avg_sq), out, grad_scale, rounding)
        return
    fused = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
    # The kernel derives both corrections from the step: beta ** inf is 0, which is "no correction".
    step = torch.full((), hyper.step if hyper.bias_correction else math.inf, dtype=torch.float32, device=device)

    def update(p: Tensor, g: Tensor, states: list[Tensor], scratch: _Scratch) -> None:
        fused(
            *([p], [g], [states[0]], [states[1]], [], [step]),
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )

    on_host = device.type == "cpu"
    arguments = (update, master, grad, (exp_avg, exp_avg_sq), out, grad_scale, rounding)
    _sweep(*arguments, whole_vectors=on_host, owned_grad=False)


def _moments(hyper: AdamHyper, g: Tensor, states: list[Tensor], scratch: _Scratch) -> Tensor:
    """Update both moments with `g`; returns the bias-corrected `m / (sqrt(v) + eps)` in scratch."""
    exp_avg, exp_avg_sq = states
    one, two = scratch.like("one", g), scratch.like("two", g)
    exp_avg.mul_(hyper.beta1).add_(torch.mul(g, 1 - hyper.beta1, out=one))
    exp_avg_sq.mul_(hyper.beta2).add_(torch.mul(g, g, out=one).mul_(1 - hyper.beta2))
    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    torch.sqrt(exp_avg_sq, out=two).mul_(1 / math.sqrt(correction2)).add_(hyper.eps)
    return torch.mul(exp_avg, 1 / correction1, out=one).div_(two)


def _adam_in_steps(hyper: AdamHyper, p: Tensor, g: Tensor, states: list[Tensor], scratch: _Scratch) -> None:
    """Adam without a fused kernel."""
    if hyper.decoupled:
        p.mul_(1 - hyper.lr * hyper.weight_decay)
    else:
        _decay_into(g, p, hyper.weight_decay, scratch)
    p.sub_(_moments(hyper, g, states, scratch).mul_(hyper.lr))


def _decay_into(g: Tensor, p: Tensor, weight_decay: float, scratch: _Scratch) -> None:
    """L2 decay: add `weight_decay * p` to the gradient."""
    if weight_decay:
        g.add_(torch.mul(p, weight_decay, out=scratch.like("decay", p)))


def sgd(
    master: Buffer,
    grad: Buffer,
    momentum: Buffer | None,
    out: Buffer | None,
    hyper: SgdHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `SgdFn`."""

    def update(p: Tensor, g: Tensor, states: list[Tensor], scratch: _Scratch) -> None:
        _decay_into(g, p, hyper.weight_decay, scratch)
        step = scratch.like("one", g)
        if states:
            (average,) = states
            if hyper.first:
                average.copy_(g)
            else:
                average.mul_(hyper.momentum).add_(torch.mul(g, 1 - hyper.dampening, out=step))
            g = g.add_(torch.mul(average, hyper.momentum, out=step)) if hyper.nesterov else average
        p.sub_(torch.mul(g, hyper.lr, out=step))

    _sweep(update, master, grad, () if momentum is None else (momentum,), out, grad_scale, rounding)


def adagrad(
    master: Buffer,
    grad: Buffer,
    sum_sq: Buffer,
    out: Buffer | None,
    hyper: AdagradHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `AdagradFn`."""
    rate = hyper.lr / (1 + (hyper.step - 1) * hyper.lr_decay)

    def update(p: Tensor, g: Tensor, states: list[Tensor], scratch: _Scratch) -> None:
        _decay_into(g, p, hyper.weight_decay, scratch)
        (total,) = states
        one = scratch.like("one", g)
        total.add_(torch.mul(g, g, out=one))
        p.sub_(g.mul_(rate).div_(torch.sqrt(total, out=one).add_(hyper.eps)))

    _sweep(update, master, grad, (sum_sq,), out, grad_scale, rounding)


def lion(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    out: Buffer | None,
    hyper: LionHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `LionFn`."""

    def update(p: Tensor, g: Tensor, states: list[Tensor], scratch: _Scratch) -> None:
        (average,) = states
        one, two = scratch.like("one", g), scratch.like("two", g)
        blend = torch.mul(average, hyper.beta1, out=two).add_(torch.mul(g, 1 - hyper.beta1, out=one))
        # torch calls the sign of NaN 0, which would freeze the parameter in silence.
        direction = torch.where(blend.isnan(), blend, torch.sign(blend, out=one), out=two)
        p.mul_(1 - hyper.lr * hyper.weight_decay).sub_(direction.mul_(hyper.lr))
        average.mul_(hyper.beta2).add_(g.mul_(1 - hyper.beta2))

    _sweep(update, master, grad, (exp_avg,), out, grad_scale, rounding)


def lamb_direction(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    direction: Buffer,
    hyper: AdamHyper,
    grad_scale: float,
) -> None:
    """See `LambDirectionFn`. The decay is always added to the direction; `hyper.decoupled` says nothing here."""

    def update(p: Tensor, g: Tensor, states: list[Tensor], scratch: _Scratch) -> None:
        (target,) = states[2:]
        step = _moments(hyper, g, states[:2], scratch)
        _decay_into(step, p, hyper.weight_decay, scratch)
        target.copy_(step)

    _sweep(update, master, grad, (exp_avg, exp_avg_sq, direction), None, grad_scale)


def lamb_apply(
    master: Buffer, direction: Buffer, out: Buffer | None, rate: float, rounding: StochasticRounding | None = None
) -> None:
    """See `LambApplyFn`."""

    def update(p: Tensor, step: Tensor, states: list[Tensor], scratch: _Scratch) -> None:
        p.sub_(step.mul_(rate))

    _sweep(update, master, direction, (), out, 1.0, rounding)
