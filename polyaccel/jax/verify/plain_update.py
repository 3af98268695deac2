"""Updates of whole parameters, as a script without an engine makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyaccel.engine.policies.engines import native_optimizer_of
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.jax.muon import transformation_of
from polyaccel.jax.pytree import named_leaves
from polyaccel.jax.traced_transformation import takes_value
from polyaccel.ops.numpy import NumpyMath
from polyaccel.zero.update.optimizers import RowOptimizer, TrustRatioOptimizer

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
"""By the name of the parameter."""


class PlainUpdate:
    """The script's transformation on the tree of parameters, or the formula of the config's optimizer on each.

    `structure` has the leaves `names`, and those that are not trained are zeros to a transformation. `compiled` returns
    the program of a transformation's update.
    """

    def __init__(
        self, client: Any, runtime: EngineBuilder, structure: Any, names: list[str], compiled: Callable[..., Any]
    ) -> None:
        client = transformation_of(runtime.config.optimizer) if client is None else client
        self._client, self._structure, self._names = client, structure, names
        self.group: dict[str, Any] = {}
        """Hyperparameters of the config's optimizer."""
        self._steps = 0
        self._states: dict[str, list[Any]] = {}
        self._tree_state: Any = None
        if client is not None:
            self._apply = compiled(client.update)
            return
        native = native_optimizer_of(runtime.config)
        if native is None or not isinstance(native[0], RowOptimizer) or isinstance(native[0], TrustRatioOptimizer):
            section = runtime.config.optimizer
            kind = None if section is None else section.type
            raise PolyaccelError(
                f"there is no plain optimizer to compare {kind} with",
                hint="verify with AdamW, or pass a transformation of optax: the other rewrites are the same",
                value=kind,
            )
        self._row, self.group = native[0].row, dict(native[1])

    @property
    def takes_loss(self) -> bool:
        """Whether the transformation gets the mean loss of a step."""
        return self._client is not None and takes_value(self._client.update)

    def update(self, params: Arrays, gradients: Arrays, loss: float) -> dict[str, Array]:
        """The parameters that are trained, after an update."""
        self._steps += 1
        if self._client is not None:
            whole, given = self._tree(params), self._tree(gradients)
            if self._tree_state is None:
                self._tree_state = self._client.init(whole)
            extra = [np.float32(loss)] if self.takes_loss else []
            whole, self._tree_state = self._apply(given, self._tree_state, whole, *extra)
            found = dict(zip(self._names, jax.tree.leaves(whole), strict=True))
            return {name: np.asarray(found[name]) for name in params}
        rule = self._row.rule(self.group, self._steps)
        after = {}
        for name, value in params.items():
            wide = value.astype(np.float64).reshape(-1)
            states = self._states.setdefault(name, [self._start(state, wide) for state in rule.formula.reads])
            gradient = gradients[name].astype(np.float64).reshape(-1)
            moved, *self._states[name] = rule.formula.reference(
                NumpyMath(), rule.settings, rule.step, wide, gradient, *states
            )
            after[name] = np.asarray(moved, np.float32).reshape(value.shape)
        return after

    def states(self) -> dict[str, Any]:
        """The optimizer's states, by the names that `EngineValues.states` gives them."""
        if self._client is not None:
            paths, _ = jax.tree_util.tree_flatten_with_path(self._tree_state)
            return {jax.tree_util.keystr(path): leaf for path, leaf in paths}
        reads = self._row.rule(self.group, self._steps).formula.reads
        return {
            f"{name} {state}": value.astype(np.float32)
            for name, values in self._states.items()
            for state, value in zip(reads, values, strict=True)
        }

    def _start(self, state: str, like: Array) -> Array:
        key = self._row.states[state]
        return np.full_like(like, 0.0 if key is None else float(self.group.get(key, 0.0)))

    def _tree(self, values: Arrays) -> Any:
        leaves = [jnp.asarray(values[name]) if name in values else self._zeros[name] for name in self._names]
        return jax.tree.unflatten(self._structure, leaves)

    def continue_from(self, state: Any) -> None:
        """Begin with a state of the transformation, in the types that it has on parameters in float32."""
        like = jax.eval_shape(self._client.init, jax.tree.unflatten(self._structure, list(self._zeros.values())))
        leaves = zip(jax.tree.leaves(like), jax.tree.leaves(state), strict=True)
        typed = [leaf if jnp.result_type(leaf) == one.dtype else jnp.asarray(leaf, one.dtype) for one, leaf in leaves]
        self._tree_state = jax.tree.unflatten(jax.tree.structure(like), typed)

    def hold_frozen(self, params: Any) -> None:
        """Take zeros in the shapes of `params` for what is not trained."""
        self._zeros = {name: jnp.zeros(jnp.shape(leaf), jnp.float32) for name, leaf in named_leaves(params)[0].items()}


def transform(update: Callable[..., Any], gradients: Any, state: Any, params: Any, *loss: Any) -> Any:
    """Return parameters and states after an `update` of a transformation, which may take the loss."""
    updates, state = update(gradients, state, params, **dict(zip(["value"], loss, strict=False)))
    return jax.tree.map(lambda one, by: (one + by).astype(one.dtype), params, updates), state
