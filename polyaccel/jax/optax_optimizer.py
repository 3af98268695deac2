"""An optax transformation on slices of the parameters, in place of the config's optimizer.

The transformation is traced once on the caller's tree of parameters, so masks and labels see names, shapes and ranks of
arrays as in plain optax. What JAX has traced is cut into one program for each parameter, which runs on flat slices that
begin anywhere (`polyaccel.jax.elementwise`). A transformation that cannot be cut is refused by name.

[Note: Weight-initialised states]
Such a state is computed from the slice's weights before its first update, which a number of our own counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError
from polyaccel.jax.elementwise.evaluate import Elements, NotElementwise, Number, Value, evaluate
from polyaccel.jax.elementwise.graph import Atom, Graph, buffer_names, function_name, state_leaves, structure_of
from polyaccel.jax.pytree import dtype_of, named_leaves
from polyaccel.jax.views import array_over
from polyaccel.zero.plan.policy import DEFAULT_PRECISION
from polyaccel.zero.update.optimizers import Group, Shard, SliceOptimizer

_UPDATES = "updates"
"""Our own number: how many updates there were."""


@dataclass(frozen=True, eq=False)
class Program:
    """The update of a parameter, on any slice of it, and of all parameters with the same update."""

    param: int
    """The index of one of them, which stands for all."""
    states: Mapping[str, int]
    """The index of each of its states among those of the transformation, by name."""
    starts: Mapping[str, float | None] = field(default_factory=dict)
    """The value with which each state begins; None where it follows from the weights."""


class TracedTransformation:
    """`transformation` as JAX traces it on the tree `params`, whose floating leaves are trained and held as
    `param_dtype` (None: as they are). Raises ShardingError where the transformation fails there."""

    def __init__(self, transformation: Any, params: Any, param_dtype: DType | None = None) -> None:
        self.transformation = transformation
        named, self._structure = named_leaves(params)
        self.names = list(named)
        """The parameters in tree order."""
        self.is_trained = [dtype_of(fqn, leaf).is_floating for fqn, leaf in named.items()]
        self.shapes = [
            jax.ShapeDtypeStruct(jnp.shape(leaf), _master_dtype(dtype_of(fqn, leaf), param_dtype))
            for fqn, leaf in named.items()
        ]
        self.name = function_name([getattr(transformation.update, "__qualname__", "")]) or type(transformation).__name__
        tree = jax.tree.unflatten(self._structure, self.shapes)
        try:
            state = jax.eval_shape(transformation.init, tree)
            self.state_paths, self._state_structure = jax.tree_util.tree_flatten_with_path(state)
            self.leaves = state_leaves(tree, state)
            self.init = Graph.trace(transformation.init, tree)
            self.graph = Graph.trace(self.update, tree, [leaf for _, leaf in self.state_paths], tree)
        except Exception as error:
            frames = (getattr(frame.f_code, "co_qualname", "") for frame, _ in walk_tb(error.__traceback__))
            name = function_name([*str(error).split(), *reversed(list(frames))]) or self.name
            raise ShardingError(
                f"the optax transformation {name} fails on these parameters: {type(error).__name__}: {error}",
                hint="give it masks and labels of the tree of parameters; the engine passes gradients, state and "
                "parameters to `update`, and no loss value",
                value=name,
            ) from error

    def update(self, grads: Any, state: Sequence[Any], params: Any) -> tuple[Any, list[Any]]:
        """(new parameters, leaves of the new state)."""
        updates, after = self.transformation.update(grads, jax.tree.unflatten(self._state_structure, state), params)
        moved = jax.tree.map(lambda one, by: (one + by).astype(one.dtype), params, updates)
        return moved, jax.tree.leaves(after)

    def tree_of(self, arrays: Mapping[str, Any]) -> Any:
        """The tree of arrays by name, zeros for parameters that are not trained."""
        pairs = zip(self.names, self.shapes, strict=True)
        leaves = [arrays[fqn] if fqn in arrays else jnp.zeros(shape.shape, shape.dtype) for fqn, shape in pairs]
        return jax.tree.unflatten(self._structure, leaves)


class OptaxOptimizer(SliceOptimizer):
    """Runs a transformation on flat slices. Raises NotElementwise for one that cannot run on them."""

    def __init__(self, traced: TracedTransformation) -> None:
        self._names, self._shapes, self._trained = traced.names, traced.shapes, traced.is_trained
        self._leaves, self._init, self._update = traced.leaves, traced.init, traced.graph
        self._paths = [jax.tree_util.keystr(path) for path, _ in traced.state_paths]
        self._plan()
        self._apply = jax.jit(self.step, static_argnums=0)
        self._count = jax.jit(self.numbers_after)

    def _plan(self) -> None:
        """Find the program of every parameter, and the numbers that programs need. Raises NotElementwise."""
        count = len(self._names)
        grads, states = self._update.inputs[:count], self._update.inputs[count : count + len(self._leaves)]
        self._inputs = grads, states, self._update.inputs[count + len(states) :]
        of_params: list[list[int]] = [[] for _ in range(count)]
        for at, leaf in enumerate(self._leaves):
            if leaf.param is not None:
                of_params[leaf.param].append(at)
        self._number_names = {at: f"optax{leaf.text}" for at, leaf in enumerate(self._leaves) if leaf.is_number}
        programs: dict[Hashable, Program] = {}
        self.programs: dict[str, Program] = {}
        """The program of each trained parameter, by name."""
        self.state_paths: dict[str, dict[str, str]] = {}
        """Where plain optax has each state of a trained parameter, by their names."""
        for param, fqn in enumerate(self._names):
            if self._trained[param]:
                names = buffer_names([self._leaves[at] for at in of_params[param]])
                program = Program(param, dict(zip(names, of_params[param], strict=True)))
                self.state_paths[fqn] = {name: self._paths[at] for name, at in program.states.items()}
                key = self._structure(program)
                if key not in programs:
                    programs[key] = self._proved(program)
                self.programs[fqn] = programs[key]
        self._distinct = list(programs.values())
        self._find_numbers()

    def _outputs(self, program: Program) -> list[Atom]:
        """The new weights of a parameter, and its new states."""
        after = self._update.outputs[len(self._names) :]
        return [self._update.outputs[program.param], *(after[at] for at in program.states.values())]

    def _structure(self, program: Program) -> Hashable:
        grads, states, params = self._inputs
        roles: dict[int, Hashable] = {grads[program.param].index: "gradient", params[program.param].index: "weights"}
        roles |= {states[at].index: ("state", name) for name, at in program.states.items()}
        roles |= {states[at].index: ("number", name) for at, name in self._number_names.items()}
        starts = [self._init.outputs[at] for at in program.states.values()]
        at_start = structure_of(self._init, starts, {self._init.inputs[program.param].index: "weights"})
        types = tuple(str(self._leaves[at].dtype) for at in program.states.values())
        return (structure_of(self._update, self._outputs(program), roles), at_start, tuple(program.states), types)

    def _proved(self, program: Program) -> Program:
        """The program with its starts. Raises NotElementwise for one that cannot run on slices."""
        shape = self._shapes[program.param]
        slice_of = jax.ShapeDtypeStruct((8,), shape.dtype)
        states = {name: jax.ShapeDtypeStruct((8,), np.float32) for name in program.states}
        numbers = {name: jax.ShapeDtypeStruct((), np.float32) for name in self._number_names.values()}
        jax.eval_shape(lambda *given: self._evaluate(program, *given), slice_of, slice_of, states, numbers)
        starts: dict[str, float | None] = {}
        for name, at in program.states.items():
            _, read = self._init.needed([self._init.outputs[at]])
            if read.isdisjoint(node.index for node in self._init.inputs):
                (found,) = evaluate(self._init, [self._init.outputs[at]], {})
                if not isinstance(found, Number):
                    raise NotElementwise("", "its states begin with other values at every place")
                starts[name] = float(found.value)
            else:
                starts[name] = None
                jax.eval_shape(partial(self._begin, program, name), slice_of)
        return Program(program.param, program.states, starts)

    def _find_numbers(self) -> None:
        """Find the numbers that programs need, recursively. Raises NotElementwise if parameters decide one."""
        states, after = self._inputs[1], self._update.outputs[len(self._names) :]
        wanted = [atom for program in self._distinct for atom in self._outputs(program)]
        live: set[int] = set()
        while True:
            _, read = self._update.needed(wanted)
            found = {at for at in self._number_names if states[at].index in read} - live
            if not found:
                break
            live |= found
            wanted = [after[at] for at in found]
        self._numbers = {self._number_names[at]: at for at in sorted(live)}
        self.numbers: dict[str, float] = {}
        """Its states of one number each, by name."""
        for name, at in self._numbers.items():
            self.numbers[name] = float(evaluate(self._init, [self._init.outputs[at]], {})[0].value)
        jax.eval_shape(self.numbers_after, dict.fromkeys(self.numbers, 0.0))
        if any(start is None for program in self._distinct for start in program.starts.values()):
            self.numbers[_UPDATES] = 0.0  # see [Note: Weight-initialised states]

    def follow(self, layers: Mapping[str, str]) -> dict[str, str]:
        """Update each of `layers` as the whole parameter of that name; return the programs' names."""
        self.programs |= {name: self.programs[fqn] for name, fqn in layers.items() if fqn in self.programs}
        order = {id(program): str(at) for at, program in enumerate(self._distinct)}
        return {fqn: order[id(program)] for fqn, program in self.programs.items()}

    @property
    def state_names(self) -> tuple[str, ...]:
        """The states with one value an element."""
        return tuple(dict.fromkeys(name for program in self._distinct for name in program.states))

    def numbers_by_path(self) -> dict[str, float]:
        """Its states of one number each, by the path that they have in plain optax."""
        return {self._paths[at]: self.numbers[name] for name, at in self._numbers.items()}

    @property
    def kind(self) -> str:
        """A text that is equal for transformations which understand each other's states."""
        texts = (self._leaves[at].text for program in self._distinct for at in program.states.values())
        return "optax: " + ", ".join(sorted({*texts, *self.numbers}))

    def initialise_states(self, states: Mapping[str, Buffer], group: Group, param: ParamSpec) -> None:
        for name, start in self.programs[param.fqn].starts.items():
            states[name].fill(start or 0.0)

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        before = dict(self.numbers)
        for shard in shards:
            program = self.programs[shard.bucket.slots[0].param.fqn]  # as all of the bucket, by `follow`
            for run in shard.runs:
                master, grad, _, states = shard.cut(run)
                kept = {name: array_over(states[name], (run.numel,), name) for name in program.states}
                weights = array_over(master, (run.numel,), "master weights")
                gradient = array_over(grad, (run.numel,), "gradients")
                found, after = jax.block_until_ready(self._apply(program, weights, gradient, kept, before, grad_scale))
                compute = shard.tier.compute
                master.copy_from(compute.import_array(found))
                for name, value in after.items():
                    states[name].copy_from(compute.import_array(value))
                shard.write_params(run)
            yield shard
        self.numbers = {name: float(value) for name, value in self._count(before).items()}

    def step(
        self,
        program: Program,
        weights: Any,
        gradient: Any,
        states: Mapping[str, Any],
        numbers: Mapping[str, Any],
        scale: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Return (new weights, new states) of a slice for `gradient * scale`; traced by JAX, float32."""
        wide = gradient.astype(weights.dtype) * jnp.asarray(scale, weights.dtype)
        states = {
            name: jnp.where(numbers[_UPDATES] == 0.0, self._begin(program, name, weights), states[name])
            if program.starts[name] is None
            else states[name]
            for name in program.states
        }
        after, *found = self._evaluate(program, weights, wide, states, numbers)
        return after, dict(zip(program.states, found, strict=True))

    def numbers_after(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers after an update, to be traced by JAX."""
        after = self._update.outputs[len(self._names) :]
        found = evaluate(self._update, [after[at] for at in self._numbers.values()], self._given(numbers))
        new = {name: jnp.asarray(value.value, jnp.float32) for name, value in zip(self._numbers, found, strict=True)}
        return new | {name: numbers[name] + 1.0 for name in numbers if name == _UPDATES}

    def _given(self, numbers: Mapping[str, Any]) -> dict[int, Value]:
        states = self._inputs[1]
        return {
            states[at].index: Number(jnp.asarray(numbers[name]).astype(self._leaves[at].dtype))
            for at, name in self._number_names.items()
            if name in numbers
        }

    def _evaluate(
        self, program: Program, weights: Any, gradient: Any, states: Mapping[str, Any], numbers: Mapping[str, Any]
    ) -> list[Any]:
        """The new weights of a slice, and its new states in float32."""
        param = program.param
        grads, of_states, params = self._inputs
        given = self._given(numbers)
        given |= {grads[param].index: Elements(gradient, param), params[param].index: Elements(weights, param)}
        for name, at in program.states.items():
            given[of_states[at].index] = Elements(states[name].astype(self._leaves[at].dtype), param)
        after, *found = evaluate(self._update, self._outputs(program), given)
        kept = [
            _rounded(_spread(value, weights, np.float32), self._leaves[at].dtype)
            for value, at in zip(found, program.states.values(), strict=True)
        ]
        return [_spread(after, weights, weights.dtype), *kept]

    def _begin(self, program: Program, name: str, weights: Any) -> Any:
        """A state as it follows from a slice's weights."""
        output = self._init.outputs[program.states[name]]
        given: dict[int, Value] = {self._init.inputs[program.param].index: Elements(weights, program.param)}
        (found,) = evaluate(self._init, [output], given)
        return _spread(found, weights, np.float32)


def _spread(value: Value, like: Any, dtype: Any) -> Any:
    if not isinstance(value, (Elements, Number)):
        raise NotElementwise("", "its numbers depend on an element's place")
    return jnp.broadcast_to(jnp.asarray(value.value), like.shape).astype(dtype)


def _rounded(value: Any, dtype: Any) -> Any:
    """A state in float32, rounded to the type that the transformation keeps it in: XLA drops a cast there and back."""
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        return value
    facts = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, facts.nexp, facts.nmant)


def _master_dtype(own: DType, param_dtype: DType | None) -> np.dtype[Any]:
    """The type of the weights that the optimizer sees; arrays that are not trained stand in as float32."""
    held = param_dtype if param_dtype is not None and own.is_floating else own
    return np.dtype(numpy_dtype(DEFAULT_PRECISION.master_of(held)) if held.is_floating else np.float32)
