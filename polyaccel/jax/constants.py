"""What a program has closed over.

[Note: Constants of a program]
What a function closes over becomes a constant of the compiled program. A parameter there would keep the value of the
first call for good and have no gradient, so before a program runs for the first time its constants, and those of the
jitted functions in it, are compared with the memory of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from polyaccel.errors import ShardingError


def require_no_parameter(program: ClosedJaxpr, owner_of: Callable[[Any], str | None]) -> None:
    """Raise ShardingError for a constant of `program` that `owner_of` knows by name. See [Note: Constants of a
    program]."""
    for constant in _constants(program):
        fqn = owner_of(constant)
        if fqn is not None:
            raise ShardingError(
                f"the function closed over parameter {fqn!r}: it would keep today's value for good",
                cure="use what the function gets as its first argument",
                value=fqn,
            )


def _constants(program: ClosedJaxpr) -> Iterator[Any]:
    yield from program.consts
    for equation in program.jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _constants(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()))


def _is_program(value: Any) -> bool:
    return isinstance(value, (ClosedJaxpr, Jaxpr))
