"""Operations on whole arrays, evaluated on flat slices of them.

A value is one of three. *Elements* are a slice of one parameter's array, flat. A *number* is equal at all places of an
array, whatever its shape, and is kept once. All others are *whole* arrays, equal on all ranks. Elements and numbers
give elements by an operation that treats all elements the same way; every other use of them is `NotElementwise`, so an
evaluation that succeeds proves that the function may run on slices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.jax.elementwise.graph import Atom, Constant, Graph, Node, Operation, shape_of

# fmt: off
_ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
        "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "cos", "cosh", "digamma", "div",
        "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag",
        "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
        "neg", "nextafter", "not", "or", "polygamma", "population_count", "pow", "real", "reduce_precision", "rem",
        "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
        "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
    }
)
# fmt: on
_REARRANGING = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "expand_dims",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "transpose",
    }
)
"""Operations whose result has the values of their input; in place, where the shape stays."""


_NEEDS_MORE = "a parameter's update needs other parameters, or a state that is neither its own nor a number"


class NotElementwise(Exception):
    """An operation does not treat all elements the same way. `name`: the function that asked for it; `reason`: how."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name, self.reason = name, reason


@dataclass(frozen=True, slots=True)
class Elements:
    """A flat slice of an array of parameter `owner`."""

    value: Any
    owner: Hashable


@dataclass(frozen=True, slots=True)
class Number:
    """One value, at all places of an array."""

    value: Any


@dataclass(frozen=True, slots=True)
class Whole:
    """An array that is equal on all ranks."""

    value: Any


Value = Elements | Number | Whole


def evaluate(graph: Graph, outputs: Sequence[Atom], given: Mapping[int, Value]) -> list[Value]:
    """Return `outputs` for inputs by index. Raises NotElementwise, also for a missing input."""
    known: dict[int, Value] = dict(given)
    operations, _ = graph.needed(outputs)
    for operation in operations:
        inputs = [_read(atom, known, operation) for atom in operation.inputs]
        results = _condition(operation, inputs) if operation.branches else _apply(operation, inputs)
        known.update((node.index, value) for node, value in zip(operation.outputs, results, strict=True))
    return [_read(atom, known, None) for atom in outputs]


def _read(atom: Atom, known: Mapping[int, Value], reader: Operation | None) -> Value:
    if isinstance(atom, Node):
        if atom.index not in known:
            raise NotElementwise(reader.origin() if reader else "", _NEEDS_MORE)
        return known[atom.index]
    value = atom.value
    if np.ndim(value) == 0:
        return Number(value)
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    if not is_key and np.size(value) and np.all(np.asarray(value) == np.asarray(value).flat[0]):
        return Number(np.asarray(value).flat[0])
    return Whole(value)


def _apply(operation: Operation, inputs: Sequence[Value]) -> list[Value]:
    if any(isinstance(value, Elements) for value in inputs):
        return [_on_elements(operation, inputs)]
    shape = operation.outputs[0].shape
    if inputs and all(isinstance(value, Number) for value in inputs):
        if operation.name in _REARRANGING:
            return [inputs[0]]
        are_scalars = not shape and all(shape_of(atom) == () for atom in operation.inputs)
        if operation.name in _ELEMENTWISE or are_scalars:
            return [Number(value) for value in _bind(operation, [value.value for value in inputs])]
    wide = [
        jnp.broadcast_to(value.value, shape_of(atom)) if isinstance(value, Number) else value.value
        for atom, value in zip(operation.inputs, inputs, strict=True)
    ]
    return [
        Whole(value) if node.shape else Number(value)
        for node, value in zip(operation.outputs, _bind(operation, wide), strict=True)
    ]


def _on_elements(operation: Operation, inputs: Sequence[Value]) -> Value:
    found = [value for value in inputs if isinstance(value, Elements)]
    owner, count = found[0].owner, found[0].value.shape[0]
    shape = operation.outputs[0].shape
    keeps = len(operation.inputs) == 1 and shape_of(operation.inputs[0]) == shape
    if operation.name in _REARRANGING:
        order = operation.params.get("permutation") or operation.params.get("broadcast_dimensions")
        if keeps and (order is None or tuple(order) == tuple(range(len(shape)))):
            return found[0]
    elif keeps and operation.params.get("axes") == ():
        return found[0]
    if operation.name not in _ELEMENTWISE:
        raise NotElementwise(operation.origin(), f"it applies {operation.name!r} to a whole array")
    if any(value.owner != owner for value in found):
        raise NotElementwise(operation.origin(), _NEEDS_MORE)
    if any(isinstance(value, Whole) for value in inputs):
        raise NotElementwise(operation.origin(), "its numbers depend on an element's place")
    (result,) = _bind(operation, [_spread(value, count) for value in inputs])
    return Elements(result, owner)


def _spread(value: Value, count: int) -> Any:
    return value.value if isinstance(value, Elements) else jnp.broadcast_to(jnp.asarray(value.value), (count,))


def _bind(operation: Operation, values: Sequence[Any]) -> list[Any]:
    result = operation.primitive.bind(*map(jnp.asarray, values), **operation.params)
    return list(result) if operation.primitive.multiple_results else [result]


def _condition(operation: Operation, inputs: Sequence[Value]) -> list[Value]:
    chooser, *rest = inputs
    if not isinstance(chooser, Number):
        raise NotElementwise(operation.origin(), "a condition depends on a parameter's elements")
    counts = [value.value.shape[0] for value in rest if isinstance(value, Elements)]
    owners = {value.owner for value in rest if isinstance(value, Elements)}
    shape, dtype = operation.outputs[0].shape, operation.outputs[0].dtype
    kinds: list[type[Value]] = []

    def note_kind(branch: Graph) -> Any:
        found = results(branch)
        kinds.append(type(found))
        return found.value

    def results(branch: Graph) -> Value:
        given = {node.index: value for node, value in zip(branch.inputs, rest, strict=True)}
        return evaluate(branch, branch.outputs, given)[0]

    for branch in operation.branches:
        jax.eval_shape(partial(note_kind, branch))
    if Elements in kinds and (Whole in kinds or len(owners) > 1):
        raise NotElementwise(operation.origin(), "its numbers depend on an element's place")
    kind = Elements if Elements in kinds else Whole if Whole in kinds else Number

    def computed(branch: Graph) -> Callable[[], Any]:
        def value() -> Any:
            found = jnp.asarray(results(branch).value, dtype)
            return jnp.broadcast_to(found, {Elements: counts[:1], Whole: shape, Number: ()}[kind])

        return value

    value = jax.lax.switch(jnp.asarray(chooser.value, jnp.int32), [computed(branch) for branch in operation.branches])
    if kind is Elements:
        return [Elements(value, owners.pop())]
    return [Whole(value) if kind is Whole else Number(value)]


__all__ = ["Constant", "Elements", "NotElementwise", "Number", "Value", "Whole", "evaluate"]
