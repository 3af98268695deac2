"""The floating-point operations of a traced JAX function: products and convolutions, loops as often as they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.core.types import DType, ParamSpec
from polyaccel.observability.profiles import ProfileNode, ProfileSettings, report_profile, tree_of
from polyaccel.observability.stats import WorkCounter

_SIZES = (512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S = 0.01
_TRIES = 5


class BatchWork:
    """Counts tokens and operations of micro-batches in `counter`, if that is enabled: one trace for each shape."""

    def __init__(
        self,
        counter: WorkCounter,
        trace: Callable[[Any], Any],
        dtype: DType | None,
        profile: ProfileSettings | None,
        parameters: int,
    ) -> None:
        """Keep `trace`, which gives a batch's `ClosedJaxpr`; the batch of step `profile` is profiled."""
        self._counter = counter
        self._trace = trace
        self._known: dict[Any, int] = {}
        self._profile = profile
        self._parameters = parameters
        if dtype is not None:
            counter.measure_peak = lambda: measured_peak(dtype)

    @property
    def is_on(self) -> bool:
        """Whether it looks at batches."""
        return self._counter.enabled or self._profile is not None

    def count(self, batch: Any, step: int) -> None:
        """Count a micro-batch of optimizer step `step`, that is trained on."""
        is_due = self._profile is not None and step >= self._profile.step
        if not self._counter.enabled and not is_due:
            return
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), batch)
        leaves, structure = jax.tree.flatten(shapes)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._known or is_due:
            found = operations_by_scope(self._trace(shapes))
            self._known[key] = found.total()
            if self._profile is not None and is_due:
                title = f"flops profile of step {self._profile.step}, one micro-batch of rank 0"
                report_profile(profile_of(found, self._parameters), title, self._profile)
                self._profile = None
        whole = (leaf for leaf in leaves if len(leaf.shape) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer))
        self._counter.add(next((prod(leaf.shape) for leaf in whole), 0), self._known[key])


def profile_of(operations: Counter[str], parameters: int) -> ProfileNode:
    """The tree of scopes; which parameters are whose is unknown, and so is how long a scope takes."""
    nodes = {"": ProfileNode("", "function", parameters, operations.total(), None, 1)}
    for scope in operations:
        parts = scope.split("/") if scope else []
        for length in range(1, len(parts) + 1):
            above = "/".join(parts[:length])
            inside = sum(count for name, count in operations.items() if f"{name}/".startswith(f"{above}/"))
            dotted = ".".join(part.replace(".", "_") for part in parts[:length])
            nodes[dotted] = ProfileNode(dotted, "scope", None, inside, None, 1)
    return tree_of(nodes)


def first_dtype(specs: Sequence[ParamSpec]) -> DType | None:
    """The type of the first floating parameter."""
    return next((spec.dtype for spec in specs if spec.dtype.is_floating), None)


def measured_peak(dtype: DType) -> float:
    """Measure operations a second of square products of `dtype`, large enough to take 10 ms."""
    best, product = 0.0, jax.jit(jnp.matmul)
    for size in _SIZES:
        operand = jnp.ones((size, size), np.dtype(numpy_dtype(dtype)))
        product(operand, operand).block_until_ready()
        times = []
        for _ in range(_TRIES):
            began = perf_counter()
            product(operand, operand).block_until_ready()
            times.append(perf_counter() - began)
        best = max(best, 2 * size**3 / min(times))
        if min(times) >= _LONG_ENOUGH_S:
            break
    return best


def operations_by_scope(traced: Any) -> Counter[str]:
    """Count operations by name stack; loops count their turns, unknown ones once, `cond` its dearest branch."""
    found: Counter[str] = Counter()
    for scope, operations in _walk(traced.jaxpr, ""):
        found[scope] += operations
    return found


def _walk(jaxpr: Any, above: str) -> Iterator[tuple[str, int]]:
    for equation in jaxpr.eqns:
        own = str(equation.source_info.name_stack)
        scope = f"{above}/{own}".strip("/") if own else above
        name = equation.primitive.name
        if name == "dot_general":
            yield scope, _product(equation)
        elif name == "conv_general_dilated":
            yield scope, _convolution(equation)
        elif name == "cond":
            branches = [list(_walk(branch.jaxpr, scope)) for branch in equation.params["branches"]]
            yield from max(branches, key=lambda rows: sum(count for _, count in rows))
        else:
            times = equation.params["length"] if name == "scan" else 1
            for inner in _inner(equation):
                yield from ((place, times * count) for place, count in _walk(inner, scope))


def _inner(equation: Any) -> Iterator[Any]:
    """The functions that an equation calls."""
    for key in ("jaxpr", "call_jaxpr", "body_jaxpr", "fun_jaxpr"):
        value = equation.params.get(key)
        if value is not None:
            yield getattr(value, "jaxpr", value)
            return


def _product(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return int(2 * prod(equation.outvars[0].aval.shape) * prod(shape[axis] for axis in contracted))


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return int(2 * prod(equation.outvars[0].aval.shape) * prod(kernel) // outputs)
