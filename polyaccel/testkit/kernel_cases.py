"""The cases of the kernels' contract: every op, called in the ways in which the step calls it.

Mixed precision has 16-bit gradients and parameters beside float32 states; the optimizers run in it, in float32 and in
float64, with a gradient scale and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyaccel.buffer import Buffer
from polyaccel.ops import reference
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    CAST,
    COMBINE,
    LAMB_APPLY,
    LAMB_DIRECTION,
    LION,
    SCALE,
    SGD,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    LionHyper,
    Op,
    SgdHyper,
    StochasticRounding,
)
from polyaccel.ops.reference import Float64s
from polyaccel.types import DType, ReduceOp

_F = DType.FLOAT32
_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
_PRECISIONS = (
    (_F, _F, None),
    (_F, DType.BFLOAT16, DType.BFLOAT16),
    (_F, DType.FLOAT16, DType.FLOAT16),
    (DType.FLOAT64,) * 3,
)
"""Element types of (states, gradients, parameters written beside the master weights)."""


@dataclass(frozen=True)
class Argument:
    """A buffer that a kernel is called with: its role, its element type, and whether the kernel must write it.

    The contents of a "square" are never negative; a "grad" may be left in any state.
    """

    role: str
    dtype: DType

    @property
    def written(self) -> bool:
        return self.role not in ("grad", "source")


@dataclass(frozen=True)
class KernelCase:
    """One way of calling one op.

    `call` runs the kernel on one buffer an argument; `meaning` maps the arguments' contents before to those after, with
    None for what the kernel may leave in any state. `call_rounding` runs it with stochastic rounding; None for an op
    without weights.
    """

    name: str
    op: Op[Any]
    arguments: tuple[Argument, ...]
    call: Callable[[KernelTable, Sequence[Buffer]], None]
    meaning: Callable[[Sequence[Float64s]], Sequence[Float64s | None]]
    call_rounding: Callable[[KernelTable, Sequence[Buffer], StochasticRounding], None] | None = None

    def __str__(self) -> str:
        return self.name


def kernel_cases(dtypes: frozenset[DType]) -> tuple[KernelCase, ...]:
    """Every op in several forms, for a device with these element types."""
    cases = [*_elementwise_cases(), *_adam_cases(), *_other_optimizer_cases(), *_lamb_cases()]
    return tuple(case for case in cases if {argument.dtype for argument in case.arguments} <= dtypes)


def _elementwise_cases() -> list[KernelCase]:
    cases = []
    for target in _TYPES:
        for source in dict.fromkeys((target, _F)):
            for op in ReduceOp:
                cases.append(_combine_case(op, target, source))
            cases.append(_cast_case(source, target))
        cases.append(
            KernelCase(
                f"scale {target.value}",
                SCALE,
                (Argument("target", target),),
                lambda table, buffers: table[SCALE](buffers[0], 0.37),
                lambda before: [reference.scale(before[0], 0.37)],
            )
        )
    return cases


def _combine_case(op: ReduceOp, target: DType, source: DType) -> KernelCase:
    return KernelCase(
        f"combine {op.value} {source.value} into {target.value}",
        COMBINE,
        (Argument("target", target), Argument("source", source)),
        lambda table, buffers: table[COMBINE](buffers[0], buffers[1], op),
        lambda before: [reference.combine(before[0], before[1], op), before[1]],
    )


def _cast_case(source: DType, out: DType) -> KernelCase:
    return KernelCase(
        f"cast {source.value} to {out.value}",
        CAST,
        (Argument("source", source), Argument("out", out)),
        lambda table, buffers: table[CAST](buffers[0], buffers[1]),
        lambda before: [before[0], before[0]],
        lambda table, buffers, rounding: table[CAST](buffers[0], buffers[1], rounding),
    )


Step = Callable[[KernelTable, Sequence[Buffer], Buffer | None, float, StochasticRounding | None], None]
Meaning = Callable[[Sequence[Float64s], float], Sequence[Float64s | None]]


def _optimizer_cases(name: str, op: Op[Any], roles: Sequence[str], step: Step, meaning: Meaning) -> list[KernelCase]:
    """An optimizer in every precision. `roles` name its buffers, the master weights first and the gradient second."""
    cases = []
    for state, grad, out in _PRECISIONS:
        for grad_scale in (1.0, 0.3):
            arguments = [Argument(role, grad if role == "grad" else state) for role in roles]
            if out is not None:
                arguments.append(Argument("out", out))
            cases.append(
                _optimizer_case(f"{name} {grad.value} x {grad_scale}", op, arguments, step, meaning, grad_scale)
            )
    return cases


def _optimizer_case(
    name: str, op: Op[Any], arguments: Sequence[Argument], step: Step, meaning: Meaning, grad_scale: float
) -> KernelCase:
    has_out = arguments[-1].role == "out"
    count = len(arguments) - has_out

    def call(table: KernelTable, buffers: Sequence[Buffer], rounding: StochasticRounding | None = None) -> None:
        step(table, buffers[:count], buffers[-1] if has_out else None, grad_scale, rounding)

    def after(before: Sequence[Float64s]) -> Sequence[Float64s | None]:
        values = list(meaning(before[:count], grad_scale))
        return [*values, values[0]] if has_out else values

    return KernelCase(name, op, tuple(arguments), call, after, None if op is LAMB_DIRECTION else call)


def _adam_cases() -> list[KernelCase]:
    cases = []
    for hyper in (
        AdamHyper(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3),
        AdamHyper(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, step=1, decoupled=False),
        AdamHyper(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-8, weight_decay=0.0, step=2, bias_correction=False),
    ):
        cases += _adam_case(hyper)
    return cases


def _adam_case(hyper: AdamHyper) -> list[KernelCase]:
    def step(
        table: KernelTable,
        b: Sequence[Buffer],
        out: Buffer | None,
        grad_scale: float,
        rounding: StochasticRounding | None,
    ) -> None:
        table[ADAM](b[0], b[1], b[2], b[3], out, hyper, grad_scale, rounding)

    def meaning(a: Sequence[Float64s], grad_scale: float) -> Sequence[Float64s | None]:
        master, m, v = reference.adam(a[0], a[1], a[2], a[3], hyper, grad_scale)
        return master, None, m, v

    name = f"adam{'w' if hyper.decoupled else ''} step {hyper.step}"
    return _optimizer_cases(name, ADAM, ("master", "grad", "average", "square"), step, meaning)


def _other_optimizer_cases() -> list[KernelCase]:
    cases = []
    for hyper in (
        SgdHyper(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=True, first=True),
        SgdHyper(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.0, nesterov=False, first=False),
        SgdHyper(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=True, first=False),
        SgdHyper(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.01, nesterov=False, first=False),
    ):
        cases += _sgd_case(hyper)

    adagrad = AdagradHyper(lr=0.1, eps=1e-10, weight_decay=0.01, lr_decay=0.1, step=4)
    cases += _optimizer_cases(
        "adagrad",
        ADAGRAD,
        ("master", "grad", "square"),
        lambda table, b, out, scale, rounding: table[ADAGRAD](b[0], b[1], b[2], out, adagrad, scale, rounding),
        lambda a, grad_scale: _around_grad(reference.adagrad(a[0], a[1], a[2], adagrad, grad_scale)),
    )
    lion = LionHyper(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1)
    cases += _optimizer_cases(
        "lion",
        LION,
        ("master", "grad", "average"),
        lambda table, b, out, scale, rounding: table[LION](b[0], b[1], b[2], out, lion, scale, rounding),
        lambda a, grad_scale: _around_grad(reference.lion(a[0], a[1], a[2], lion, grad_scale)),
    )
    return cases


def _sgd_case(hyper: SgdHyper) -> list[KernelCase]:
    has_momentum = hyper.momentum != 0

    def step(
        table: KernelTable,
        b: Sequence[Buffer],
        out: Buffer | None,
        grad_scale: float,
        rounding: StochasticRounding | None,
    ) -> None:
        table[SGD](b[0], b[1], b[2] if has_momentum else None, out, hyper, grad_scale, rounding)

    def meaning(a: Sequence[Float64s], grad_scale: float) -> Sequence[Float64s | None]:
        master, average = reference.sgd(a[0], a[1], a[2] if has_momentum else None, hyper, grad_scale)
        return (master, None) if average is None else (master, None, average)

    name = f"sgd {hyper.momentum}{' nesterov' if hyper.nesterov else ''}{' first' if hyper.first else ''}"
    return _optimizer_cases(name, SGD, ("master", "grad", *(("average",) if has_momentum else ())), step, meaning)


def _lamb_cases() -> list[KernelCase]:
    hyper = AdamHyper(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.1, step=3)
    cases = []
    for grad in _TYPES[:3]:
        roles = (("master", _F), ("grad", grad), ("average", _F), ("square", _F), ("direction", _F))
        cases.append(
            _optimizer_case(
                f"lamb direction {grad.value}",
                LAMB_DIRECTION,
                [Argument(*role) for role in roles],
                lambda table, b, out, scale, rounding: table[LAMB_DIRECTION](
                    b[0], b[1], b[2], b[3], b[4], hyper, scale
                ),
                lambda a, grad_scale: _lamb_after(
                    reference.lamb_direction(a[0], a[1], a[2], a[3], hyper, grad_scale), a[0]
                ),
                0.3,
            )
        )
    for out in (None, *_TYPES[:3]):
        arguments = [Argument("master", _F), Argument("source", _F)]
        cases.append(
            _optimizer_case(
                f"lamb apply {out.value if out else 'alone'}",
                LAMB_APPLY,
                [*arguments, *([Argument("out", out)] if out else [])],
                lambda table, b, out, scale, rounding: table[LAMB_APPLY](b[0], b[1], out, 0.05, rounding),
                lambda a, grad_scale: (reference.lamb_apply(a[0], a[1], 0.05), a[1]),
                1.0,
            )
        )
    return cases


def _around_grad(after: tuple[Float64s, Float64s]) -> Sequence[Float64s | None]:
    """(master, state) as (master, gradient, state); the gradient may be anything."""
    return after[0], None, after[1]


def _lamb_after(after: tuple[Float64s, Float64s, Float64s], master: Float64s) -> Sequence[Float64s | None]:
    direction, m, v = after
    return master, None, m, v, direction
