"""An optax transformation as JAX traces it on a tree of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import Parameter, signature
from traceback import walk_tb
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.core.types import DType
from polyaccel.errors import ShardingError
from polyaccel.jax.elementwise.graph import Graph, function_name, state_leaves
from polyaccel.jax.pytree import dtype_of, named_leaves
from polyaccel.zero.plan.policy import DEFAULT_PRECISION


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
        self.takes_loss = takes_value(transformation.update)
        """Whether `update` gets the loss, as the extra argument `value`."""
        tree = jax.tree.unflatten(self._structure, self.shapes)
        try:
            state = jax.eval_shape(transformation.init, tree)
            self.state_paths, self._state_structure = jax.tree_util.tree_flatten_with_path(state)
            self.leaves = state_leaves(tree, state)
            self.init = Graph.trace(transformation.init, tree)
            self.graph = Graph.trace(self.update, tree, [leaf for _, leaf in self.state_paths], tree, self.loss_shape)
        except Exception as error:
            frames = (getattr(frame.f_code, "co_qualname", "") for frame, _ in walk_tb(error.__traceback__))
            name = function_name([*str(error).split(), *reversed(list(frames))]) or self.name
            raise ShardingError(
                f"the optax transformation {name} fails on these parameters: {type(error).__name__}: {error}",
                hint=_hint_for(str(error)),
                value=name,
            ) from error

    @cached_property
    def needs_loss(self) -> bool:
        """Whether anything follows from the loss."""
        _, read = self.graph.needed(self.graph.outputs)
        return self.takes_loss and self.graph.inputs[-1].index in read

    @cached_property
    def hyperparams(self) -> dict[str, int]:
        """The state leaves of `optax.inject_hyperparams`: by name, or by path where there are several of a name."""
        found = [(at, path) for at, (path, _) in enumerate(self.state_paths) if _is_hyperparam(path)]
        names = [str(path[-1].key) for _, path in found]
        return {
            name if names.count(name) == 1 else jax.tree_util.keystr(path): at
            for name, (at, path) in zip(names, found, strict=True)
        }

    def follows_itself(self, at: int) -> bool:
        """Whether a leaf of the state is computed from its last value."""
        _, read = self.graph.needed([self.graph.outputs[len(self.names) + at]])
        return self.graph.inputs[len(self.names) + at].index in read

    @property
    def loss_shape(self) -> Any:
        """A loss, without a value; None where `update` gets none."""
        return jax.ShapeDtypeStruct((), np.float32) if self.takes_loss else None

    def update(self, grads: Any, state: Sequence[Any], params: Any, loss: Any = None) -> tuple[Any, list[Any]]:
        """(new parameters, leaves of the new state)."""
        before, extra = jax.tree.unflatten(self._state_structure, state), {"value": loss} if self.takes_loss else {}
        updates, after = self.transformation.update(grads, before, params, **extra)
        moved = jax.tree.map(lambda one, by: (one + by).astype(one.dtype), params, updates)
        return moved, jax.tree.leaves(after)

    def tree_of(self, arrays: Mapping[str, Any]) -> Any:
        """The tree of arrays by name, zeros for parameters that are not trained."""
        pairs = zip(self.names, self.shapes, strict=True)
        leaves = [arrays[fqn] if fqn in arrays else jnp.zeros(shape.shape, shape.dtype) for fqn, shape in pairs]
        return jax.tree.unflatten(self._structure, leaves)


def takes_value(update: Any) -> bool:
    """Whether `update` of a transformation takes the extra argument `value`."""
    try:
        found = signature(update).parameters
    except (TypeError, ValueError):
        return False
    return "value" in found or any(one.kind is Parameter.VAR_KEYWORD for one in found.values())


def _is_hyperparam(path: Sequence[Any]) -> bool:
    return len(path) > 1 and getattr(path[-2], "name", None) == "hyperparams" and hasattr(path[-1], "key")


def _hint_for(error: str) -> str:
    """What to do about the error of an update."""
    if "value_fn" in error:
        return "use one without a line search, which calls the loss function again inside of an update"
    if "attribute 'fast'" in error:
        return "pass params=optax.LookaheadParams.init_synced(params): the function gets the fast weights"
    if "unhashable" in error:
        return 'name arguments that are no numbers in static_args: optax.inject_hyperparams(f, static_args="mu_dtype")'
    for name in ("obj_fn", "grad_fn"):
        if name in error:
            return f"use one without {name}: the engine calls the loss function itself"
    return (
        "give it masks and labels of the tree of parameters; the engine passes gradients, state, parameters and "
        "the loss as `value` to `update`"
    )


def _master_dtype(own: DType, param_dtype: DType | None) -> np.dtype[Any]:
    """The type of the weights that the optimizer sees; arrays that are not trained stand in as float32."""
    held = param_dtype if param_dtype is not None and own.is_floating else own
    return np.dtype(numpy_dtype(DEFAULT_PRECISION.master_of(held)) if held.is_floating else np.float32)
