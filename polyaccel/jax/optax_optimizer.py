"""An optax transformation on slices of the parameters, in place of the config's optimizer.

The transformation is traced once on the caller's tree of parameters, so masks and labels see names, shapes and ranks of
arrays as in plain optax. What JAX has traced is cut into one program for each parameter, which runs on flat slices that
begin anywhere (`polyaccel.jax.elementwise`). A transformation that cannot be cut is refused by name.

[Note: Weight-initialised states]
Such a state is computed from the slice's weights before its first update, which a number of our own counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import PolyaccelError
from polyaccel.jax.elementwise.evaluate import Elements, NotElementwise, Number, Value, evaluate
from polyaccel.jax.elementwise.graph import Atom, buffer_names, structure_of
from polyaccel.jax.traced_transformation import TracedTransformation
from polyaccel.jax.views import array_over
from polyaccel.zero.update.optimizers import Group, Shard, SliceOptimizer

_UPDATES = "updates"
"""Our own number: how many updates there were."""
_NARROW = frozenset({np.dtype(jnp.bfloat16), np.dtype(np.float16)})
_LOSS = "loss"
"""Our own number: the mean loss of a step."""


@dataclass(frozen=True, eq=False)
class Program:
    """The update of a parameter, on any slice of it, and of all parameters with the same update."""

    param: int
    """The index of one of them, which stands for all."""
    states: Mapping[str, int]
    """The index of each of its states among those of the transformation, by name."""
    starts: Mapping[str, float | None] = field(default_factory=dict)
    """The value with which each state begins; None where it follows from the weights."""


class TransformationOptimizer(SliceOptimizer):
    """An optimizer that runs a transformation of optax."""

    def __init__(self, traced: TracedTransformation) -> None:
        self.traced = traced
        self.loss: float | None = None
        """The mean loss of this rank's micro-batches, for a transformation that needs it."""
        self.loss_of_ranks = 0.0
        """The mean over ranks, set for an update in native mode."""

    @abstractmethod
    def number(self, at: int) -> float:
        """The value of leaf `at` of the state, which is one number."""

    @abstractmethod
    def set_number(self, at: int, value: float) -> None:
        """Overwrite leaf `at` of the state, which is one number."""

    def require_loss(self, loss: float | None, hint: str) -> None:
        """Raise PolyaccelError where the transformation needs the loss of a step and there is none."""
        if self.traced.needs_loss and loss is None:
            raise PolyaccelError(
                f"the optax transformation {self.traced.name} needs the loss of the step, and there is none",
                hint=hint,
                value=self.traced.name,
            )

    def mean_loss(self, communicator: Communicator) -> float:
        """Return the mean over ranks, or 0 for a transformation that does not need it. Collective."""
        if not self.traced.needs_loss:
            return 0.0
        self.require_loss(self.loss, "compute gradients by train_batch or grad_step")
        assert self.loss is not None
        if communicator.world_size == 1:
            return self.loss
        found: list[float] = communicator.all_gather_object(self.loss)
        return sum(found) / len(found)


class OptaxOptimizer(TransformationOptimizer):
    """Runs a transformation on flat slices. Raises NotElementwise for one that cannot run on them."""

    def __init__(self, traced: TracedTransformation) -> None:
        super().__init__(traced)
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
        self._inputs = grads, states, self._update.inputs[count + len(states) : 2 * count + len(states)]
        self._of_loss = {node.index for node in self._update.inputs[2 * count + len(states) :]}
        of_params: list[list[int]] = [[] for _ in range(count)]
        for at, leaf in enumerate(self._leaves):
            if leaf.param is not None:
                of_params[leaf.param].append(at)
        self._number_names = {at: f"optax{leaf.text}" for at, leaf in enumerate(self._leaves) if leaf.is_number}
        self._states_of: dict[str, Mapping[str, int]] = {}
        """The index of each state of a trained parameter among those of the transformation, by their names."""
        names_of = [buffer_names([self._leaves[at] for at in of_param]) for of_param in of_params]
        self._kept = self._kept_types(of_params, names_of)
        """The type in which each state rests, by name."""
        programs: dict[Hashable, Program] = {}
        self.programs: dict[str, Program] = {}
        """The program of each trained parameter, by name."""
        self.state_paths: dict[str, dict[str, str]] = {}
        """Where plain optax has each state of a trained parameter, by their names."""
        for param, fqn in enumerate(self._names):
            if self._trained[param]:
                program = Program(param, dict(zip(names_of[param], of_params[param], strict=True)))
                self._states_of[fqn] = program.states
                self.state_paths[fqn] = {name: self._paths[at] for name, at in program.states.items()}
                key = self._structure(program)
                if key not in programs:
                    programs[key] = self._proved(program)
                self.programs[fqn] = programs[key]
        self._distinct = list(programs.values())
        self._find_numbers()

    def _kept_types(
        self, of_params: Sequence[Sequence[int]], names_of: Sequence[Sequence[str]]
    ) -> dict[str, np.dtype[Any]]:
        """The type of 16 bits in which all trained parameters have a state, else float32, by name."""
        found: dict[str, set[np.dtype[Any]]] = {}
        for states, names, is_trained in zip(of_params, names_of, self._trained, strict=True):
            for at, name in zip(states, names, strict=True):
                if is_trained:
                    found.setdefault(name, set()).add(np.dtype(self._leaves[at].dtype))
        return {
            name: next(iter(types)) if len(types) == 1 and types <= _NARROW else np.dtype(np.float32)
            for name, types in found.items()
        }

    def _outputs(self, program: Program) -> list[Atom]:
        """The new weights of a parameter, and its new states."""
        after = self._update.outputs[len(self._names) :]
        return [self._update.outputs[program.param], *(after[at] for at in program.states.values())]

    def _structure(self, program: Program) -> Hashable:
        grads, states, params = self._inputs
        roles: dict[int, Hashable] = {grads[program.param].index: "gradient", params[program.param].index: "weights"}
        roles |= {states[at].index: ("state", name) for name, at in program.states.items()}
        roles |= {states[at].index: ("number", name) for at, name in self._number_names.items()}
        roles |= dict.fromkeys(self._of_loss, _LOSS)
        starts = [self._init.outputs[at] for at in program.states.values()]
        at_start = structure_of(self._init, starts, {self._init.inputs[program.param].index: "weights"})
        types = tuple(str(self._leaves[at].dtype) for at in program.states.values())
        return (structure_of(self._update, self._outputs(program), roles), at_start, tuple(program.states), types)

    def _proved(self, program: Program) -> Program:
        """The program with its starts. Raises NotElementwise for one that cannot run on slices."""
        shape = self._shapes[program.param]
        slice_of = jax.ShapeDtypeStruct((8,), shape.dtype)
        states = {name: jax.ShapeDtypeStruct((8,), np.float32) for name in program.states}
        numbers = {name: jax.ShapeDtypeStruct((), np.float32) for name in (*self._number_names.values(), _LOSS)}
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
        found = {at for at in self.traced.hyperparams.values() if at in self._number_names}
        while True:
            _, read = self._update.needed(wanted)
            found |= {at for at in self._number_names if states[at].index in read} - live
            if not found:
                break
            live |= found
            wanted, found = [after[at] for at in found], set()
        self._numbers = {self._number_names[at]: at for at in sorted(live)}
        self.numbers: dict[str, float] = {}
        """Its states of one number each, by name."""
        for name, at in self._numbers.items():
            self.numbers[name] = float(evaluate(self._init, [self._init.outputs[at]], {})[0].value)
        jax.eval_shape(self.numbers_after, dict.fromkeys([*self.numbers, _LOSS], 0.0))
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

    @property
    def numbers_for_update(self) -> dict[str, float]:
        """The numbers, and the mean loss of the step."""
        return self.numbers | ({_LOSS: self.loss_of_ranks} if self.traced.needs_loss else {})

    @property
    def state_types(self) -> dict[str, DType]:
        """Those of 16 bits, such as `mu_dtype` asks for, if all parameters have it."""
        return {name: DType.parse(dtype.name) for name, dtype in self._kept.items() if dtype.itemsize < 4}

    def numbers_by_path(self) -> dict[str, float]:
        """Its states of one number each, by the path that they have in plain optax."""
        return {self._paths[at]: self.numbers[name] for name, at in self._numbers.items()}

    def named_states(self, leaves: Sequence[Any], steps: int) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """Return what plain optax has after `steps` steps as its own: states by name and parameter, and numbers."""
        states: dict[str, dict[str, Any]] = {name: {} for name in self.state_names}
        for fqn, of_param in self._states_of.items():
            for name, at in of_param.items():
                states[name][fqn] = leaves[at]
        numbers = {name: float(leaves[at]) for name, at in self._numbers.items()}
        return states, numbers | ({_UPDATES: float(steps)} if _UPDATES in self.numbers else {})

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
        before = self.numbers | {_LOSS: self.mean_loss(communicator)}
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

    def step_leaves(
        self,
        weights: Mapping[str, Any],
        gradients: Mapping[str, Any],
        states: Mapping[str, Mapping[str, Any]],
        numbers: Mapping[str, Any],
        scale: Any,
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return (new weights, new states) by parameter, as `step` does for slices: plain optax on whole leaves."""
        scaled = {}
        for fqn, one in gradients.items():
            dtype = weights[fqn].dtype
            scaled[fqn] = one.astype(dtype) * jnp.asarray(scale, dtype)
        params = self.traced.tree_of(weights)
        leaves = jax.tree.leaves(self.traced.transformation.init(params))
        for at, name in self._number_names.items():
            if name in numbers:
                leaves[at] = jnp.asarray(numbers[name]).astype(self._leaves[at].dtype)
        for fqn in weights:
            program, at_of = self.programs[fqn], self._states_of[fqn]
            for name, at in at_of.items():
                kept = states[fqn][name].astype(self._leaves[at].dtype)
                begins = program.starts[name] is None
                leaves[at] = jnp.where(numbers[_UPDATES] == 0.0, leaves[at], kept) if begins else kept
        loss = jnp.asarray(numbers.get(_LOSS, 0.0), jnp.float32)
        moved, after = self.traced.update(self.traced.tree_of(scaled), leaves, params, loss)
        found = dict(zip(self._names, jax.tree.leaves(moved), strict=True))
        new = {
            fqn: {name: after[at].astype(self._kept[name]) for name, at in self._states_of[fqn].items()}
            for fqn in weights
        }
        return {fqn: found[fqn] for fqn in weights}, new

    def numbers_after(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers after an update, to be traced by JAX."""
        after = self._update.outputs[len(self._names) :]
        found = evaluate(self._update, [after[at] for at in self._numbers.values()], self._given(numbers))
        new = {name: jnp.asarray(value.value, jnp.float32) for name, value in zip(self._numbers, found, strict=True)}
        return new | {name: numbers[name] + 1.0 for name in numbers if name == _UPDATES}

    def _given(self, numbers: Mapping[str, Any]) -> dict[int, Value]:
        states = self._inputs[1]
        given: dict[int, Value] = {
            states[at].index: Number(jnp.asarray(numbers[name]).astype(self._leaves[at].dtype))
            for at, name in self._number_names.items()
            if name in numbers
        }
        loss = Number(jnp.asarray(numbers.get(_LOSS, 0.0), jnp.float32))
        return given | dict.fromkeys(self._of_loss, loss)

    def number(self, at: int) -> float:
        return self.numbers[self._number_names[at]]

    def set_number(self, at: int, value: float) -> None:
        self.numbers[self._number_names[at]] = value

    def _evaluate(
        self, program: Program, weights: Any, gradient: Any, states: Mapping[str, Any], numbers: Mapping[str, Any]
    ) -> list[Any]:
        """The new weights of a slice, and its new states in the types in which they rest."""
        param = program.param
        grads, of_states, params = self._inputs
        given = self._given(numbers)
        given |= {grads[param].index: Elements(gradient, param), params[param].index: Elements(weights, param)}
        for name, at in program.states.items():
            given[of_states[at].index] = Elements(states[name].astype(self._leaves[at].dtype), param)
        after, *found = evaluate(self._update, self._outputs(program), given)
        kept = [
            _rounded(_spread(value, weights, np.float32), self._leaves[at].dtype).astype(self._kept[name])
            for value, (name, at) in zip(found, program.states.items(), strict=True)
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
