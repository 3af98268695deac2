"""A function that JAX has traced, as a flat list of operations.

Calls are inlined, and every result of a condition is its own operation, so that what one result needs is found without
the others. Or both branches of a condition are inlined too, and each result is selected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """One array of a transformation's state: one value for each element of parameter `param` (an index in tree order),
    or of none. `path` is where it stands, without the parameter's own path."""

    param: int | None
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_number(self) -> bool:
        """Whether it is one number for all parameters."""
        is_extended = jax.dtypes.issubdtype(self.dtype, jax.dtypes.extended)
        return self.param is None and self.shape == () and not is_extended

    @property
    def text(self) -> str:
        return str(jax.tree_util.keystr(self.path))


def state_leaves(params: Any, state: Any) -> list[StateLeaf]:
    """Return `state`'s leaves in tree order, each with the parameter whose path and shape it has."""
    places = {path: (at, leaf.shape) for at, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0])}
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        ends = (end for end in range(len(path) + 1) if places.get(path[end:], (0, None))[1] == leaf.shape)
        end = next(ends, None)
        param = None if end is None else places[path[end:]][0]
        leaves.append(StateLeaf(param, path[:end], tuple(leaf.shape), leaf.dtype))
    return leaves


def buffer_names(leaves: Sequence[StateLeaf]) -> list[str]:
    """Name each state of a parameter by the end of its path, the same in all parts of the state."""
    names: list[str] = []
    for leaf in leaves:
        end = "optax" + jax.tree_util.keystr(leaf.path[-1:])
        names.append(end if end not in names else f"{end}#{names.count(end) + 1}")
        while names[-1] in names[:-1]:
            names[-1] += "'"
    return names


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}
"""Operations that stand for their inner program, and the parameter that has it."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is fixed when the function is traced."""

    value: Any


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the function, with its shape and type."""

    index: int
    shape: tuple[int, ...]
    dtype: Any


Atom = Node | Constant


@dataclass(frozen=True, slots=True)
class Operation:
    """`outputs` of `primitive` from `inputs`. `branches` has the programs of a condition, whose first input chooses
    and whose others are what any branch needs."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Node, ...]
    tracebacks: tuple[Any, ...]
    """Those of the calls that it was inside of, outermost first, and its own; JAX keeps what is inside of a call for
    other callers, with the traceback of the first."""
    branches: tuple[Graph, ...] = ()

    @property
    def name(self) -> str:
        return str(self.primitive.name)

    def origin(self) -> str:
        """The name of the function that asked for the operation, "" if unknown."""
        frames = [frame for traceback in self.tracebacks for frame in getattr(traceback, "frames", None) or ()]
        return function_name(frame.function_name for frame in frames)


class Graph:
    """The operations of a traced function, in order, and its `inputs` and `outputs`.

    `selects` inlines the branches of conditions, whose operations then all run.
    """

    def __init__(self, traced: ClosedJaxpr, *, selects: bool = False) -> None:
        self._count = 0
        self._selects = selects
        self._operations: list[Operation] = []
        self._producer: dict[int, int] = {}
        self.inputs = tuple(self._node(variable) for variable in traced.jaxpr.invars)
        self.outputs = tuple(self._inline(traced.jaxpr, traced.consts, self.inputs))

    @classmethod
    def trace(cls, function: Callable[..., Any], *arguments: Any, selects: bool = False) -> Graph:
        """Trace `function` of arrays given as shapes and types; inputs and outputs are the leaves in tree order."""
        return cls(jax.make_jaxpr(function)(*arguments), selects=selects)

    def needed(self, outputs: Iterable[Atom]) -> tuple[list[Operation], set[int]]:
        """The operations that `outputs` follow from, in order, and the indices of the nodes that these read."""
        found, reached = set[int](), set[int]()
        waiting = [atom for atom in outputs if isinstance(atom, Node)]
        while waiting:
            node = waiting.pop()
            if node.index in reached:
                continue
            reached.add(node.index)
            at = self._producer.get(node.index)
            if at is not None and at not in found:
                found.add(at)
                waiting += [atom for atom in self._operations[at].inputs if isinstance(atom, Node)]
        return [self._operations[at] for at in sorted(found)], reached

    def _node(self, variable: Any) -> Node:
        self._count += 1
        return Node(self._count, tuple(variable.aval.shape), variable.aval.dtype)

    def _inline(
        self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Atom], callers: tuple[Any, ...] = ()
    ) -> list[Atom]:
        known: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {variable: Constant(value) for variable, value in zip(jaxpr.constvars, constants, strict=True)}

        def read(atom: Any) -> Atom:
            return Constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            tracebacks = (*callers, getattr(equation.source_info, "traceback", None))
            key = _CALLS.get(equation.primitive.name)
            inner = equation.params.get(key) if key else None
            if inner is not None:
                program, values = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
                results = self._inline(program, values, inputs, tracebacks)
                known.update(zip(equation.outvars, results, strict=True))
                continue
            outputs = [self._node(variable) for variable in equation.outvars]
            known.update(zip(equation.outvars, outputs, strict=True))
            if equation.primitive.name == "cond" and self._selects:
                self._add_selections(equation, tracebacks, inputs, outputs)
            elif equation.primitive.name == "cond":
                self._add_conditions(equation, tracebacks, inputs, outputs)
            else:
                self._add(equation, tracebacks, inputs, outputs)
        return [read(atom) for atom in jaxpr.outvars]

    def _add(
        self,
        equation: Any,
        tracebacks: tuple[Any, ...],
        inputs: Sequence[Atom],
        outputs: Sequence[Node],
        branches: tuple[Graph, ...] = (),
    ) -> None:
        self._append(
            Operation(equation.primitive, equation.params, tuple(inputs), tuple(outputs), tracebacks, branches)
        )

    def _append(self, operation: Operation) -> None:
        for output in operation.outputs:
            self._producer[output.index] = len(self._operations)
        self._operations.append(operation)

    def _add_selections(
        self, equation: Any, tracebacks: tuple[Any, ...], inputs: Sequence[Atom], outputs: Sequence[Node]
    ) -> None:
        chooser, *rest = inputs
        branches = [self._inline(one.jaxpr, one.consts, rest, tracebacks) for one in equation.params["branches"]]
        for output, *cases in zip(outputs, *branches, strict=True):
            chosen = (chooser, *cases)
            self._append(Operation(jax.lax.select_n_p, {}, chosen, (output,), tracebacks))

    def _add_conditions(
        self, equation: Any, tracebacks: tuple[Any, ...], inputs: Sequence[Atom], outputs: Sequence[Node]
    ) -> None:
        chooser, *rest = inputs
        graphs = [Graph(branch) for branch in equation.params["branches"]]
        for at, output in enumerate(outputs):
            reads = [graph.needed([graph.outputs[at]])[1] for graph in graphs]
            used = [
                position
                for position in range(len(rest))
                if any(graph.inputs[position].index in read for graph, read in zip(graphs, reads, strict=True))
            ]
            branches = tuple(_Branch(graph, used, at) for graph in graphs)
            self._add(equation, tracebacks, [chooser, *(rest[position] for position in used)], [output], branches)


class _Branch(Graph):
    """One output of a graph, as a function of the inputs that any branch needs for it."""

    def __init__(self, whole: Graph, used: Sequence[int], output: int) -> None:
        self._operations, self._producer = whole._operations, whole._producer
        self.inputs = tuple(whole.inputs[position] for position in used)
        self.outputs = (whole.outputs[output],)


def shape_of(atom: Atom) -> tuple[int, ...]:
    return atom.shape if isinstance(atom, Node) else tuple(np.shape(atom.value))


def structure_of(graph: Graph, outputs: Sequence[Atom], roles: Mapping[int, Hashable]) -> Hashable:
    """Return a value equal for outputs with equal structure from inputs of `roles`; shapes count only if used."""
    operations, _ = graph.needed(outputs)
    local: dict[int, int] = {}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, Constant):
            is_key = jax.dtypes.issubdtype(getattr(atom.value, "dtype", np.dtype(float)), jax.dtypes.extended)
            is_one = not is_key and np.size(atom.value) == 1
            return ("constant", repr(np.asarray(atom.value))) if is_one else ("constant", id(atom.value))
        return ("input", roles[atom.index]) if atom.index in roles else local.get(atom.index, ("other", atom.index))

    found: list[Hashable] = []
    for operation in operations:
        inner: Hashable = tuple(
            structure_of(branch, branch.outputs, {node.index: at for at, node in enumerate(branch.inputs)})
            for branch in operation.branches
        )
        same = all(shape_of(atom) in ((), operation.outputs[0].shape) for atom in operation.inputs)
        settings = {} if operation.branches else operation.params
        keys = tuple((key, str(value)) for key, value in sorted(settings.items()) if not (same and key in _OF_SHAPES))
        shapes: Hashable = same if same else tuple(shape_of(atom) for atom in (*operation.inputs, *operation.outputs))
        types = tuple(str(output.dtype) for output in operation.outputs)
        found.append((operation.name, keys, inner, shapes, types, tuple(map(name, operation.inputs))))
        for output in operation.outputs:
            local[output.index] = len(local)
    return tuple(found), tuple(map(name, outputs))


_OF_SHAPES = frozenset({"shape", "broadcast_dimensions", "dimensions", "new_sizes", "sharding", "out_sharding"})


def function_name(names: Iterable[str]) -> str:
    """The transformation among names of functions, innermost first: `centralize` of `centralize.<locals>.update_fn`."""
    for name in names:
        found = re.match(r"(?:.*\.)?(\w+)\.<locals>\.(?:init|update)(?:_fn)?(?:\(\)|\.<locals>.*)?$", name)
        if found is not None:
            return found[1]
    return ""
