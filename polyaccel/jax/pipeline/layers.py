"""A list of functions of JAX as one model, run in order, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError
from polyaccel.jax.pytree import dtype_of, named_leaves
from polyaccel.pipeline.table import PipelineError

Layer = Callable[[Any, Any, Any], Any]
"""`layer(params, value, rng)` -> the value that the next layer gets, any pytree of arrays."""


@dataclass(frozen=True)
class LayerList:
    """Layers, each with its own parameters. The first gets the inputs of a micro-batch, the last a pair of what the
    layer before it gives and the micro-batch's labels, and gives a scalar loss, or (loss, auxiliary output).

    The key that layer i gets is `fold_in(rng, i)`, wherever it runs; in evaluation None.
    """

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, model: Sequence[Layer], params: Any) -> LayerList:
        """Raises PolyaccelError for what is not a list of functions with as many trees of parameters."""
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
        return cls(tuple(model))

    def __call__(self, params: Any, batch: Any, rng: Any) -> Any:
        """What the last layer gives, for a whole micro-batch."""
        inputs, labels = pair_of(batch)
        return self.run(range(len(self.layers)), params, inputs, labels, rng)

    def run(self, part: range, params: Any, value: Any, labels: Any, rng: Any) -> Any:
        """What the last of the layers of `part` gives, whose first one gets `value`. `params` has a tree for every
        layer of the model, of which those of others are not looked at."""
        for index in part:
            given = (value, labels) if index + 1 == len(self.layers) else value
            value = self.layers[index](params[index], given, None if rng is None else jax.random.fold_in(rng, index))
        return value

    def names(self) -> list[str]:
        """What each layer's function, or its class, is called."""
        return [getattr(layer, "__name__", type(layer).__name__) for layer in self.layers]

    def shapes(self, params: Any, inputs: Any, labels: Any, *, trains: bool) -> list[Any]:
        """What each layer gives, as shapes, from shapes or arrays. Raises PipelineError for a layer that cannot take
        what the one before gives, naming both."""
        found: list[Any] = []
        value, names = inputs, self.names()
        for index in range(len(self.layers)):
            run = partial(self.run, range(index, index + 1), rng=jax.random.key(0) if trains else None)
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
