"""Which entries of a batch a function looks up rows in: of an array of samples that is rare, of a table it is the use.

An array that is as long as the batch by chance is cut as samples are. Rows of a part are others than rows of the whole,
and JAX takes the last row for an index beyond the end, so this cut must not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def looked_up(program: ClosedJaxpr, at: Sequence[int]) -> set[int]:
    """Those of the arguments `at` of a traced function in which it looks up rows along the first axis."""
    invars = program.jaxpr.invars
    return set(_walk(program.jaxpr, {invars[index]: index for index in at}))


def _walk(jaxpr: Jaxpr, known: Mapping[Any, int]) -> Iterator[int]:
    """`known`: the variables that are an argument, in whatever type."""
    own = dict(known)
    for equation in jaxpr.eqns:
        given = [None if isinstance(atom, Literal) else own.get(atom) for atom in equation.invars]
        if all(index is None for index in given):
            continue
        name = equation.primitive.name
        if name == "gather" and given[0] is not None and _takes_rows(equation):
            yield given[0]
        if name in _SAME and given[0] is not None:
            own[equation.outvars[0]] = given[0]
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = equation.params.get(key)
            body = getattr(inner, "jaxpr", inner)
            if isinstance(body, Jaxpr) and len(body.invars) == len(equation.invars):
                inside = {var: index for var, index in zip(body.invars, given, strict=True) if index is not None}
                yield from _walk(body, inside)


_SAME = frozenset({"convert_element_type", "copy", "stop_gradient"})


def _takes_rows(equation: Any) -> bool:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    # Of indices along several axes, the first may well count the samples: logits[arange(samples), labels].
    return tuple(numbers.start_index_map) == (0,) and sizes[0] < equation.invars[0].aval.shape[0]
