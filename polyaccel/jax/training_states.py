"""Training states of flax and optax, taken apart: `taken_apart`. The engine makes and keeps their parts itself.

Optimizer states of a run that has begun would be lost, so such a training state is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.errors import PolyaccelError

_OWN_FIELDS = frozenset({"step", "apply_fn", "params", "tx", "opt_state"})


def taken_apart(model: Any, params: Any, state: Any, optimizer: Any) -> tuple[Any, Any, Any, Any]:
    """Return model, parameters, state and transformation that a `TrainState`, an `nnx.Optimizer` and variables have.

    What was given apart replaces their parts. Raises PolyaccelError for a training state that has taken steps.
    """
    model, optimizer = _of_nnx(model, optimizer)
    if _is_train_state(params):
        whole, params = params, params.params
        optimizer = _transformation(optimizer, whole.tx, whole.step, whole.opt_state, params, "TrainState")
        state = _fields(whole, _is_linen(model)) if state is None else state
    if _is_linen(model) and isinstance(params, Mapping) and "params" in params:
        collections = {name: value for name, value in params.items() if name != "params"}
        params = params["params"]
        if state is not None and collections:
            hint = f"leave {', '.join(collections)} out of params, or state out"
            raise PolyaccelError("params has collections, and there is a state too", hint=hint, value=[*collections])
        state = collections or None if state is None else state
    return model, params, state, optimizer


def _of_nnx(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Module and transformation of an `nnx.ModelAndOptimizer` or an `nnx.Optimizer`."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return model, optimizer
    if isinstance(model, nnx.ModelAndOptimizer):
        whole, model = model, model.model
        return model, _of_optimizer(nnx, model, whole, optimizer)
    if isinstance(model, nnx.Optimizer):
        hint = "pass the module as model= and this as optimizer=, or an nnx.ModelAndOptimizer as model="
        raise PolyaccelError("an nnx.Optimizer has no module", hint=hint, value=type(model).__name__)
    if isinstance(optimizer, nnx.Optimizer) and isinstance(model, nnx.Module):
        return model, _of_optimizer(nnx, model, optimizer, None)
    return model, optimizer


def _of_optimizer(nnx: Any, model: Any, whole: Any, optimizer: Any) -> Any:
    if whole.wrt is not nnx.Param:
        raise PolyaccelError(
            f"an nnx.Optimizer trains {whole.wrt}, and the engine trains every nnx.Param",
            hint="freeze the others by optax.partition with optax.set_to_zero(), as optimizer=",
            value=str(whole.wrt),
        )
    params = nnx.state(model, nnx.Param)
    return _transformation(optimizer, whole.tx, whole.step[...], whole.opt_state, params, "nnx.Optimizer")


def _transformation(given: Any, own: Any, step: Any, states: Any, params: Any, kind: str) -> Any:
    """The transformation to train with. Raises PolyaccelError where `states` are not those of a beginning."""
    first = jax.tree.leaves(jax.eval_shape(own.init, params))
    found = jax.tree.leaves(states)
    is_first = int(step) == 0 and len(first) == len(found)
    if is_first and found:
        pairs = zip(jax.tree.leaves(own.init(params)), found, strict=True)
        is_first = all(_equal(one, other) for one, other in pairs)
    if not is_first:
        raise PolyaccelError(
            f"a {kind} has taken {int(step)} steps, and its optimizer states would be lost",
            hint="save and resume by the engine's checkpoints; to begin with new optimizer states pass the parameters "
            "as params= and the transformation as optimizer=",
            value=int(step),
        )
    return own if given is None else given


def _equal(one: Any, other: Any) -> bool:
    if jax.dtypes.issubdtype(jnp.result_type(one), jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.shape(one) == np.shape(other) and bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True))


def _fields(whole: Any, is_linen: bool) -> dict[str, Any] | None:
    """The further fields of a `TrainState` that have arrays, as a state; for a module of linen all are collections."""
    others = {one.name: getattr(whole, one.name) for one in fields(whole) if one.name not in _OWN_FIELDS}
    found = {name: value for name, value in others.items() if _has_arrays(value)}
    if is_linen and (odd := [name for name, value in found.items() if not isinstance(value, Mapping)]):
        raise PolyaccelError(
            f"the TrainState's {', '.join(odd)} are not collections of variables",
            hint='pass the collections as state={"batch_stats": train_state.batch_stats}; random keys come from the '
            "engine",
            value=odd,
        )
    return found or None


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(value))


def _is_train_state(value: Any) -> bool:
    loaded = sys.modules.get("flax.training.train_state")
    return loaded is not None and isinstance(value, loaded.TrainState)


def _is_linen(model: Any) -> bool:
    loaded = sys.modules.get("flax.linen")
    return loaded is not None and isinstance(model, loaded.Module)
