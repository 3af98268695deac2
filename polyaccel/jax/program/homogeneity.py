"""Backward passes of the user's own (`jax.custom_vjp`) that do not scale with their cotangents.

A loss scale multiplies every cotangent, and the update divides the gradients by it. That cancels where a backward pass
is homogeneous of degree 1: `c` times the cotangents give `c` times the gradients, for any `c` above 0. JAX's own rules
are linear. One that clips, normalizes, or takes signs is not, and trains with other gradients in silence.

The backward pass is traced, and the degree of each variable follows from its operands. Operations with no rule here
are taken as homogeneous: a program is refused only where the rules show that it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal

from polyaccel.errors import PolyaccelError

Degree = float | str
"""A degree of homogeneity, or one of the next three."""
_ANY, _NONE, _UNKNOWN = "any", "none", "unknown"
"""That of zero and infinity, that of no homogeneous function, and what the rules do not cover."""


def require_homogeneous(program: ClosedJaxpr) -> None:
    """Raise PolyaccelError for a traced loss with a `custom_vjp` whose backward pass a loss scale makes wrong."""
    for jaxpr, equation in _custom(program.jaxpr):
        if _is_homogeneous(jaxpr, equation):
            continue
        name = equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info or "a function"
        raise PolyaccelError(
            f"the backward pass of {name} does not scale with its cotangent, which fp16's loss scale multiplies",
            hint='train in bf16, {"bf16": {"enabled": true}}, or without a loss scale, {"fp16": {"loss_scale": 1}}; '
            "to clip gradients of parameters, use gradient_clipping or optax",
            value=name,
        )


def _custom(jaxpr: Jaxpr) -> Iterator[tuple[Jaxpr, Any]]:
    """The calls with their own backward pass, each with the program around it. Those inside of them have none."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "custom_vjp_call":
            yield jaxpr, equation
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _custom(_body(inner))


def _is_homogeneous(jaxpr: Jaxpr, equation: Any) -> bool:
    atoms = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
    results = [var for var in equation.outvars if not isinstance(var, DropVar)]
    call = jaxpr.replace(constvars=[], invars=atoms, outvars=results, eqns=[equation])
    floating = [_is_floating(atom.aval) for atom in atoms]
    wanted = [_is_floating(var.aval) for var in results]
    if not (any(floating) and any(wanted)):
        return True

    def backward(arguments: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def run(trained: Sequence[Any]) -> Any:
            left = iter(trained)
            given = [next(left) if is_one else value for is_one, value in zip(floating, arguments, strict=True)]
            found = jax.core.eval_jaxpr(call, (), *given)
            return [value for is_one, value in zip(wanted, found, strict=True) if is_one]

        trained = [value for is_one, value in zip(floating, arguments, strict=True) if is_one]
        return jax.vjp(run, trained)[1](list(cotangents))

    structs = [_struct(atom.aval) for atom in atoms]
    cotangents = [_struct(var.aval) for is_one, var in zip(wanted, results, strict=True) if is_one]
    try:
        traced = jax.make_jaxpr(backward)(structs, cotangents)
    except Exception:  # it needs what only its place in the program has, for example the name of an axis
        return True
    degrees: list[Degree] = [*[0.0] * len(structs), *[1.0] * len(cotangents)]
    return all(degree in (1.0, _ANY, _UNKNOWN) for degree in _degrees(traced, degrees))


def _degrees(program: ClosedJaxpr | Jaxpr, arguments: Sequence[Degree]) -> list[Degree]:
    """The degrees of a program's results, from those of its arguments."""
    jaxpr = _body(program)
    consts = program.consts if isinstance(program, ClosedJaxpr) else [1.0] * len(jaxpr.constvars)
    known: dict[Any, Degree] = dict(zip(jaxpr.constvars, map(_of_constant, consts), strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def degree_of(atom: Any) -> Degree:
        return _of_constant(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        known.update(
            zip(equation.outvars, _of_equation(equation, [degree_of(atom) for atom in equation.invars]), strict=True)
        )
    return [degree_of(atom) for atom in jaxpr.outvars]


def _of_equation(equation: Any, given: list[Degree]) -> list[Degree]:
    name, count = equation.primitive.name, len(equation.outvars)
    if all(degree == 0.0 for degree in given):
        return [0.0] * count
    for special in (_NONE, _UNKNOWN):
        if special in given:
            return [special] * count
    inner = next((equation.params[key] for key in _BODIES if key in equation.params), None)
    if name in _CALLS and inner is not None and len(_body(inner).invars) == len(given):
        return _degrees(inner, given)
    if name == "cond":
        if given[0] not in (0.0, _ANY):
            return [_NONE] * count
        branches = [_degrees(branch, given[1:]) for branch in equation.params["branches"]]
        return [_equal(list(each)) for each in zip(*branches, strict=True)]
    rule = _RULES.get(name)
    return [_UNKNOWN if rule is None else rule(equation, given)] * count


def _equal(given: Sequence[Degree]) -> Degree:
    """That of a sum, or of a choice between values."""
    for special in (_NONE, _UNKNOWN):
        if special in given:
            return special
    found = {degree for degree in given if degree != _ANY}
    return _NONE if len(found) > 1 else found.pop() if found else _ANY


def _times(*factors: float) -> Callable[[Any, list[Degree]], Degree]:
    """That of a product of powers."""

    def rule(equation: Any, given: list[Degree]) -> Degree:
        if _ANY in given:
            return _ANY
        return sum(factor * float(degree) for factor, degree in zip(factors, given, strict=True))

    return rule


def _first(equation: Any, given: list[Degree]) -> Degree:
    """That of the first operand, which the others give places in."""
    return given[0] if all(degree in (0.0, _ANY) for degree in given[1:]) else _NONE


def _integer_power(equation: Any, given: list[Degree]) -> Degree:
    return given[0] if given[0] == _ANY else float(given[0]) * equation.params["y"]


def _power(equation: Any, given: list[Degree]) -> Degree:
    exponent = equation.invars[1]
    if given[1] not in (0.0, _ANY):
        return _NONE
    return float(given[0]) * float(exponent.val) if isinstance(exponent, Literal) and given[0] != _ANY else _UNKNOWN


def _select(equation: Any, given: list[Degree]) -> Degree:
    return _equal(given[1:]) if given[0] in (0.0, _ANY) else _NONE


def _comparison(equation: Any, given: list[Degree]) -> Degree:
    return _NONE if _equal(given) == _NONE else 0.0


_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"})
# fmt: off
_LINEAR = (
    "neg", "abs", "reshape", "transpose", "broadcast_in_dim", "convert_element_type", "squeeze", "expand_dims",
    "reduce_sum", "reduce_max", "reduce_min", "cumsum", "cummax", "cummin", "rev", "slice", "split", "copy", "real",
    "imag", "reduce_precision", "optimization_barrier", "psum", "stop_gradient", "gather", "dynamic_slice",
)
_OTHERS = (
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "tan", "erf", "erfc", "floor", "ceil",
    "round", "and", "or", "not", "xor", "rem",
)
# fmt: on
_RULES: dict[str, Callable[[Any, list[Degree]], Degree]] = {
    **dict.fromkeys(_LINEAR, _first),
    **dict.fromkeys(("add", "sub", "add_any", "max", "min", "clamp", "concatenate", "pad"), lambda _, of: _equal(of)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _comparison),
    **dict.fromkeys(("sign", "is_finite", "argmax", "argmin"), lambda _, of: 0.0),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), _times(1.0, 1.0)),
    "div": _times(1.0, -1.0),
    **{name: _times(power) for name, power in (("sqrt", 0.5), ("rsqrt", -0.5), ("square", 2.0), ("cbrt", 1 / 3))},
    "integer_pow": _integer_power,
    "pow": _power,
    "select_n": _select,
    **dict.fromkeys(_OTHERS, lambda _, of: _NONE),
}
_LARGEST = float(np.finfo(np.float16).max)


def _of_constant(value: Any) -> Degree:
    """Of zero and infinity any. The largest numbers of fp16 and beyond count as infinity: they catch overflows."""
    if np.ndim(value) or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        return 0.0
    return _ANY if value == 0 or abs(value) >= _LARGEST else 0.0


def _is_floating(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _is_program(value: Any) -> bool:
    return isinstance(value, (ClosedJaxpr, Jaxpr))


def _body(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program
