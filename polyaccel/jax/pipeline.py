"""A list of functions of JAX as the layers of a pipeline, of which a stage has some.

[Note: Residuals of a chunk]
The program of a forward pass gives what it computes and what its backward pass needs, which is the program of another
task. Parameters and inputs among that are not given back, which would copy them: it is noted where they belong, and
the backward pass is given them again. Parameters do not change between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError
from polyaccel.jax.program.carried import StateForm, returned_kind
from polyaccel.jax.program.function import loss_and_aux
from polyaccel.jax.pytree import as_array, dtype_of, named_leaves
from polyaccel.jax.views import array_over
from polyaccel.pipeline.messages import StageMessage
from polyaccel.pipeline.table import PipelineError


class ArrayExchange:
    """Sends and receives arrays between this stage and others; `ranks` are the stages in order. A `label` describes a
    message in records and errors."""

    def __init__(self, ranks: Communicator, accelerator: Accelerator) -> None:
        self._ranks = ranks
        self._accelerator = accelerator
        self._begun: dict[StageMessage, list[tuple[Buffer, Work | None]]] = {}
        self._sending: deque[tuple[Work, object]] = deque()

    def send(self, message: StageMessage, arrays: Sequence[jax.Array], label: str) -> None:
        """Send arrays that are computed. They may be released."""
        for array in arrays:
            if array.size:
                own = as_array(array)
                buffer = self._accelerator.import_array(own)
                work = self._ranks.send(buffer, message.target, async_op=True, label=label)
                self._sending.append((work, (own, buffer)))
        while self._sending and self._sending[0][0].is_done():
            self._sending.popleft()[0].wait()

    def begin(self, message: StageMessage, shapes: Sequence[Any], label: str, *, early: bool = True) -> None:
        """Receive arrays of these shapes, `early` in the background, in the order of the waits."""
        begun = self._begun[message] = []
        for shape in shapes:
            buffer = self._accelerator.allocate(int(np.prod(shape.shape)), DType.parse(np.dtype(shape.dtype).name))
            work = None
            if buffer.numel:
                work = self._ranks.recv(buffer, message.source, async_op=early, label=label)
            begun.append((buffer, work))

    def receive(self, message: StageMessage, shapes: Sequence[Any], label: str) -> list[jax.Array]:
        """The arrays of these shapes that `send` sent."""
        if message not in self._begun:
            self.begin(message, shapes, label, early=False)
        found = []
        for (buffer, work), one in zip(self._begun.pop(message), shapes, strict=True):
            if work is not None:
                work.wait()
            found.append(array_over(buffer, tuple(one.shape), f"the {message}"))
        return found

    def settle(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def forget(self) -> None:
        """Forget what a step that failed has left."""
        self._begun.clear()
        self._sending.clear()


Layer = Callable[..., Any]
"""`layer(params, value, rng)` -> the value that the next layer gets, any pytree of arrays; or, where it has a state,
`layer(params, state, value, rng)` -> (value, new state)."""


@dataclass(frozen=True)
class LayerList:
    """Layers, each with its own parameters. The first gets the inputs of a micro-batch, the last a pair of what the
    layer before it gives and the micro-batch's labels, and gives a scalar loss, or (loss, auxiliary output).

    The key that layer i gets is `fold_in(rng, i)`, wherever it runs; in evaluation None. `forms` has that of each
    layer's state, None for one without; it is empty where no layer has one.
    """

    layers: tuple[Layer, ...]
    forms: tuple[StateForm | None, ...] = ()

    @classmethod
    def from_model(cls, model: Sequence[Layer], params: Any, state: Any = None) -> LayerList:
        """Raises PolyaccelError for what is not a list of functions with as many trees of parameters, and of state."""
        if not model or not all(map(callable, model)):
            kinds = [type(one).__name__ for one in model]
            raise PolyaccelError(f"a model that is a list of {kinds}", hint="give a list of functions", value=kinds)
        if not isinstance(params, (list, tuple)) or len(params) != len(model):
            count = len(params) if isinstance(params, (list, tuple)) else type(params).__name__
            raise PolyaccelError(
                f"{len(model)} layers, and params is {count}",
                hint="give params as a list with the pytree of each layer, {} for one without parameters",
                value=count,
            )
        if state is None:
            return cls(tuple(model))
        if not isinstance(state, (list, tuple)) or len(state) != len(model):
            count = len(state) if isinstance(state, (list, tuple)) else type(state).__name__
            raise PolyaccelError(
                f"{len(model)} layers, and state is {count}",
                hint="give state as a list with the pytree of each layer, None for one without state",
                value=count,
            )
        return cls(tuple(model), tuple(StateForm(tree) if jax.tree.leaves(tree) else None for tree in state))

    def __call__(self, params: Any, *given: Any) -> Any:
        """What the last layer gives, for a whole micro-batch: of (batch, rng), or of (state, batch, rng)."""
        *state, batch, rng = given
        inputs, labels = pair_of(batch)
        found, after = self.run(range(len(self.layers)), params, inputs, labels, rng, *state)
        if not state:
            return found
        loss, aux = loss_and_aux(found)
        return loss, (after, aux)

    def run(
        self, part: range, params: Any, value: Any, labels: Any, rng: Any, state: Sequence[Any] = ()
    ) -> tuple[Any, list[Any]]:
        """Return what the last layer of `part` gives for `value`, and the new state.

        `params` and `state` have a tree for every layer.
        """
        after = list(state)
        for index in part:
            given = (value, labels) if index + 1 == len(self.layers) else value
            key = None if rng is None else jax.random.fold_in(rng, index)
            form = self.forms[index] if self.forms else None
            if form is None:
                value = self.layers[index](params[index], given, key)
                continue
            found = self.layers[index](params[index], state[index], given, key)
            if index + 1 == len(self.layers):
                loss, result = form.split(found)
                value, after[index] = (loss, result.aux), form.tree(result.state)
            else:
                value, after[index] = self._with_new_state(index, form, found)
        return value, after

    def _with_new_state(self, index: int, form: StateForm, found: Any) -> tuple[Any, Any]:
        if not isinstance(found, tuple) or len(found) != 2:
            kind = returned_kind(found)
            raise PolyaccelError(
                f"layer {index} ({self.names()[index]}) has a state, and returned a {kind}",
                hint="return (value, new_state); new_state has the structure of the layer's state",
                value=kind,
            )
        return found[0], form.tree(form.new_data(found[1]))

    def names(self) -> list[str]:
        """What each layer's function, or its class, is called."""
        return [getattr(layer, "__name__", type(layer).__name__) for layer in self.layers]

    def shapes(self, params: Any, inputs: Any, labels: Any, *, trains: bool) -> list[Any]:
        """Return each layer's output shapes. Raises PipelineError naming two layers that do not fit."""
        found: list[Any] = []
        value, names = inputs, self.names()
        for index in range(len(self.layers)):
            run = partial(self._run_one, range(index, index + 1), jax.random.key(0) if trains else None)
            try:
                value = jax.eval_shape(run, params, value, labels)
            except (TypeError, ValueError) as error:
                before = f"what layer {index - 1} ({names[index - 1]}) gives it" if index else "a micro-batch"
                raise PipelineError(
                    f"layer {index} ({names[index]}) fails on {before}, {_described(value)}: {type(error).__name__}: "
                    f"{error}",
                    hint="let each layer take what the one before it gives, the last one a pair of that and the labels",
                    value=index,
                ) from error
            found.append(value)
        return found

    def _run_one(self, part: range, rng: Any, params: Any, value: Any, labels: Any) -> Any:
        """`run` with a state of zeros, for shapes alone."""
        state = [None if form is None else form.tree(form.zeros()) for form in self.forms]
        return self.run(part, params, value, labels, rng, state)[0]


def pair_of(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a micro-batch. Raises PolyaccelError where it is not a pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise PolyaccelError(
            f"a micro-batch of a list of layers is a {kind}", hint="give pairs (inputs, labels)", value=kind
        )
    return batch[0], batch[1]


def is_float(leaf: Any) -> bool:
    """Whether a leaf of a value has a gradient."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def shapes_of_params(params: Any, param_dtype: DType | None) -> Any:
    """The parameters as the engine holds them, as shapes: floating ones as `param_dtype` (None: as they are)."""
    leaves, structure = named_leaves(params)
    found = []
    for fqn, leaf in leaves.items():
        own = dtype_of(fqn, leaf)
        dtype = param_dtype if param_dtype is not None and own.is_floating else own
        found.append(jax.ShapeDtypeStruct(np.shape(leaf), numpy_dtype(dtype)))
    return jax.tree_util.tree_unflatten(structure, found)


def numels_of(params: Sequence[Any]) -> list[int]:
    """How many elements each layer trains."""
    return [sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree) if is_float(leaf)) for tree in params]


def _described(value: Any) -> str:
    def one(leaf: Any) -> str:
        return f"{jnp.result_type(leaf).name} of {' x '.join(map(str, np.shape(leaf))) or 'no dimensions'}"

    return ", ".join(map(one, jax.tree.leaves(value))) or "nothing"


Check = Callable[[Any, tuple[Any, ...]], None]
"""`check(program, arguments)` refuses a program that must not run; see `LossFunction.check`."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """How a function that gives gradients is made of arrays: those that a program gave, in the places with -1, and
    arguments of that program by their number."""

    structure: Any
    sources: tuple[int, ...]


class ForwardPass(NamedTuple):
    """What a forward pass of training has made: a value, or of the last chunk (loss, auxiliary output); and what the
    backward pass needs."""

    result: Any
    kept: list[Any]
    how: _Pullback
    arguments: tuple[Any, ...]
    """Trained leaves, other leaves, the value that came in, and the state before."""
    state: list[Any]
    """The data of the stage's state after it."""


class ChunkProgram:
    """The layers of `part` in training and in evaluation. `params` has a tree for each layer of the model, None for
    those of other chunks; `is_trained` has for each leaf there whether it has a gradient. Floating inputs have one too,
    except for those of the micro-batch. `form` is that of the state of the stage's layers."""

    def __init__(
        self,
        layers: LayerList,
        part: range,
        params: Any,
        is_trained: Sequence[bool],
        check: Check,
        form: StateForm | None,
    ) -> None:
        self._layers, self._part, self._form = layers, part, form
        self._is_last = part.stop == len(layers.layers)
        self._structure = jax.tree.structure(params)
        self._is_trained = tuple(is_trained)
        self._check = check
        self._forward = jax.jit(self._differentiate)
        self._backward = jax.jit(_pulled_back)
        self._evaluation = jax.jit(self._evaluate)

    def forward(
        self, leaves: Sequence[Any], value: Any, labels: Any, rng: Any, factor: float, state: Sequence[Any] = ()
    ) -> ForwardPass:
        """Run a forward pass with `leaves` and the data of a `state`; the last chunk's loss counts `factor` times."""
        trained, others = self._split(leaves)
        arguments = (trained, others, value, list(state), labels, rng, np.float32(factor))
        self._check(self._forward, arguments)
        result, after, kept, how = jax.block_until_ready(self._forward(*arguments))
        return ForwardPass(result, kept, how, (trained, others, value, list(state)), after)

    def backward(self, made: ForwardPass, gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return gradients of trained leaves and of the incoming value, from those of the result."""
        given: Any = jnp.ones_like(made.result[0]) if self._is_last else list(gradients)
        found: tuple[list[Any], list[Any]] = self._backward(made.kept, made.how, made.arguments, given)
        jax.block_until_ready(found)
        return found

    def evaluate(self, leaves: Sequence[Any], value: Any, labels: Any, state: Sequence[Any] = ()) -> Any:
        """The result of a forward pass, computed, with None for the random key. The new state is dropped."""
        arguments = (*self._split(leaves), value, list(state), labels)
        self._check(self._evaluation, arguments)
        return jax.block_until_ready(self._evaluation(*arguments))

    def _split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(leaves, self._is_trained, strict=True))
        return [leaf for leaf, wanted in pairs if wanted], [leaf for leaf, wanted in pairs if not wanted]

    def _run(self, trained: Any, others: Any, value: Any, state: Any, labels: Any, rng: Any) -> tuple[Any, Any]:
        """(what the chunk gives, the data of the state after it)."""
        wanted, rest = iter(trained), iter(others)
        leaves = [next(wanted) if is_trained else next(rest) for is_trained in self._is_trained]
        params = jax.tree_util.tree_unflatten(self._structure, leaves)
        before = () if self._form is None else self._form.tree(state)
        found, after = self._layers.run(self._part, params, value, labels, rng, before)
        data = [] if self._form is None else self._form.new_data(after)
        return loss_and_aux(found) if self._is_last else found, data

    def _differentiate(
        self, trained: Any, others: Any, value: Any, state: Any, labels: Any, rng: Any, factor: Any
    ) -> Any:
        leaves, structure = jax.tree.flatten(value)
        has_gradient = [self._part.start > 0 and is_float(leaf) for leaf in leaves]

        def run(trained: Any, floats: Any) -> Any:
            left = iter(floats)
            given = [next(left) if wanted else leaf for leaf, wanted in zip(leaves, has_gradient, strict=True)]
            result, after = self._run(trained, others, jax.tree.unflatten(structure, given), state, labels, rng)
            if self._is_last:
                return result[0] * factor.astype(result[0].dtype), (result, after)
            return [leaf for leaf in jax.tree.leaves(result) if is_float(leaf)], (result, after)

        floats = [leaf for leaf, wanted in zip(leaves, has_gradient, strict=True) if wanted]
        _, pullback, (result, after) = jax.vjp(run, trained, floats, has_aux=True)
        arrays, made_of = jax.tree.flatten(pullback)
        numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves((trained, others, value, state)))}
        sources = tuple(numbers.get(id(array), -1) for array in arrays)
        kept = [array for array, source in zip(arrays, sources, strict=True) if source < 0]
        return result, after, kept, _Pullback(made_of, sources)

    def _evaluate(self, trained: Any, others: Any, value: Any, state: Any, labels: Any) -> Any:
        return self._run(trained, others, value, state, labels, None)[0]


def _pulled_back(kept: Any, how: _Pullback, arguments: Any, gradients: Any) -> Any:
    left, given = iter(kept), jax.tree.leaves(arguments)
    arrays = [next(left) if source < 0 else given[source] for source in how.sources]
    of_params, of_inputs = jax.tree.unflatten(how.structure, arrays)(gradients)
    return list(of_params), list(of_inputs)
