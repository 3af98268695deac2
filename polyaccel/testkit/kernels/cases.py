"""The cases of the kernels' contract: every elementwise op, called in the ways in which the step calls it.

Every formula of `polyaccel.ops.optimizers` is tried in float32, in float64 and in mixed precision (16-bit gradients and
parameters with float32 states), with a gradient scale and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops import reference
from polyaccel.ops.base import CAST, REDUCE, SCALE, UPDATE, KernelTable, Op, Rule, StateRole, StochasticRounding
from polyaccel.ops.optimizers import OPTIMIZERS, apply_direction
from polyaccel.ops.reference import Float64s

_F = DType.FLOAT32
_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
_PRECISIONS = (
    (_F, _F, None),
    (_F, DType.BFLOAT16, DType.BFLOAT16),
    (_F, DType.FLOAT16, DType.FLOAT16),
    (DType.FLOAT64,) * 3,
)
"""Element types of (states, gradients, parameters written in addition to the master weights)."""


@dataclass(frozen=True)
class Argument:
    """A buffer that a kernel is called with: its role, its element type, and whether the kernel must write it.

    The contents of a "magnitude" are never negative; a "grad" may be left in any state; "weights" are only read, and
    the "master" weights written.
    """

    role: str
    dtype: DType

    @property
    def written(self) -> bool:
        return self.role not in ("grad", "source", "weights")


@dataclass(frozen=True)
class KernelCase:
    """One way of calling one op.

    `call` runs the kernel on one buffer an argument; `meaning` maps the arguments' contents before to those after, with
    None for an argument that the kernel may leave in any state. `call_rounding` runs the kernel with stochastic
    rounding; None for an op that writes no weights. `rule` is the rule of an update, None for the other ops.
    """

    name: str
    op: Op[Any]
    arguments: tuple[Argument, ...]
    call: Callable[[KernelTable, Sequence[Buffer]], None]
    meaning: Callable[[Sequence[Float64s]], Sequence[Float64s | None]]
    call_rounding: Callable[[KernelTable, Sequence[Buffer], StochasticRounding], None] | None = None
    rule: Rule | None = None

    @property
    def kernel(self) -> str:
        """The op's name, and the formula's where it has one."""
        return self.op.name if self.rule is None else f"{self.op.name} {self.rule.formula.name}"

    def __str__(self) -> str:
        return self.name


def kernel_cases(dtypes: frozenset[DType]) -> tuple[KernelCase, ...]:
    """The cases that need no element types but `dtypes`."""
    cases = [*_elementwise_cases(), *_optimizer_cases(), *_apply_cases()]
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
        REDUCE,
        (Argument("target", target), Argument("source", source)),
        lambda table, buffers: table[REDUCE](buffers[0], buffers[1], op),
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


_BETAS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
_SETTINGS: dict[str, tuple[tuple[dict[str, Any], int], ...]] = {
    "Adam": (
        (_BETAS, 3),
        ({**_BETAS, "betas": (0.9, 0.99), "eps": 1e-6, "decoupled": False}, 1),
        ({**_BETAS, "betas": (0.8, 0.95), "weight_decay": 0.0, "bias_correction": False}, 2),
    ),
    "Sgd": (
        ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, 1),
        ({"lr": 0.1, "momentum": 0.9, "dampening": 0.2}, 2),
        ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, 2),
        ({"lr": 0.1, "weight_decay": 0.01}, 2),
    ),
    "Adagrad": (({"lr": 0.1, "weight_decay": 0.01, "lr_decay": 0.1}, 4),),
    "Lion": (({**_BETAS, "betas": (0.9, 0.99)}, 1),),
    "Lamb": (({**_BETAS, "eps": 1e-6}, 3),),
}
"""Groups and numbers of updates to try, by optimizer; those not named here are tried with `_ANY`."""
_ANY = ((_BETAS, 1), (_BETAS, 3))


def _optimizer_cases() -> list[KernelCase]:
    """Every optimizer in every precision."""
    return [
        case
        for row in dict.fromkeys(OPTIMIZERS.values())
        for group, step in _SETTINGS.get(row.kind, _ANY)
        for case in _rule_cases(row.rule(group, step))
    ]


def _rule_cases(rule: Rule) -> list[KernelCase]:
    cases = []
    writes = rule.formula.writes_weights
    roles = ["master" if writes else "weights", "grad", *(kind.value for _, kind in rule.formula.states)]
    precisions = _PRECISIONS if writes else [(_F, grad, None) for grad in _TYPES[:3]]
    for state, grad, out in precisions:
        for grad_scale in (1.0, 0.3):
            arguments = [Argument(role, grad if role == "grad" else state) for role in roles]
            if out is not None:
                arguments.append(Argument("out", out))
            name = f"{rule.formula.name} step {rule.step} {grad.value} x {grad_scale}"
            cases.append(_update_case(name, rule, arguments, grad_scale))
    return cases


def _update_case(name: str, rule: Rule, arguments: Sequence[Argument], grad_scale: float) -> KernelCase:
    """`arguments` are the master weights, the gradient, the states, and perhaps `out`."""
    has_out = arguments[-1].role == "out"
    count = len(arguments) - has_out
    read_count = sum(role is not StateRole.DIRECTION for _, role in rule.formula.states)

    def call(table: KernelTable, buffers: Sequence[Buffer], rounding: StochasticRounding | None = None) -> None:
        master, grad, *states = buffers[:count]
        table[UPDATE](rule, master, grad, states, buffers[-1] if has_out else None, grad_scale, rounding)

    def after(before: Sequence[Float64s]) -> Sequence[Float64s | None]:
        master, grad, *states = before[:count]
        weights, *found = reference.update(rule, master, grad, states[:read_count], grad_scale)
        return [weights, None, *found, *([weights] if has_out else [])]

    return KernelCase(name, UPDATE, tuple(arguments), call, after, call if rule.formula.writes_weights else None, rule)


def _apply_cases() -> list[KernelCase]:
    """The subtraction of a direction, which follows an update that wrote one."""
    cases = []
    for out in (None, *_TYPES[:3]):
        arguments = [Argument("master", _F), Argument("grad", _F), *([Argument("out", out)] if out else [])]
        cases.append(_update_case(f"apply {out.value if out else 'alone'}", apply_direction(0.05), arguments, 1.0))
    return cases
