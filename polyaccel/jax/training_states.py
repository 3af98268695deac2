"""Training states of flax and optax, taken apart: `taken_apart`. The engine makes and keeps their parts itself.

A training state that has taken steps continues: its steps and optimizer states are those with which the engine begins.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.checkpoint.convert.trees import ENGINE, OPTAX, OPTIMIZER, packed, unpacked
from polyaccel.errors import PolyaccelError
from polyaccel.jax.modules import FunctionOfModule, function_of_module
from polyaccel.jax.optax_optimizer import OptaxOptimizer, TransformationOptimizer
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.pytree import path_name

_OWN_FIELDS = frozenset({"step", "apply_fn", "params", "tx", "opt_state"})


class Parts(NamedTuple):
    """What `initialize` got, without training states around it."""

    model: Any
    params: Any
    state: Any
    optimizer: Any
    begun: Begun | None


@dataclass(frozen=True)
class Begun:
    """The progress of a training state: its steps, and the states of its transformation."""

    kind: str
    step: int
    opt_state: Any

    def resume(self, engine: ResumableEngine) -> None:
        """Let a new engine continue. Collective. Raises PolyaccelError where its transformation has other states."""
        optimizer = engine.zero.optimizer
        assert isinstance(optimizer, TransformationOptimizer)  # that of the training state
        leaves = jax.tree.leaves(self.opt_state)
        likes = optimizer.traced.state_paths
        if [jnp.shape(leaf) for leaf in leaves] != [like.shape for _, like in likes]:
            raise self.error(f"whose {len(leaves)} optimizer states are not the {len(likes)} of its transformation")
        tree = engine.state_dict()
        scalars = unpacked(tree[ENGINE])
        if isinstance(optimizer, WholeStates):
            tree[OPTIMIZER][OPTAX] = optimizer.named_states(leaves)
        else:
            assert isinstance(optimizer, OptaxOptimizer)
            by_name, numbers = optimizer.named_states(leaves, self.step)
            tree[OPTIMIZER] = {name: _overlaid(old, by_name[name]) for name, old in tree[OPTIMIZER].items()}
            scalars["client_optimizer"][OPTAX] = numbers
        counters = scalars["counters"]
        counters["global_steps"] = self.step
        counters["global_samples"] = self.step * engine.train_batch_size()
        counters["micro_steps"] = self.step * counters["gradient_accumulation_steps"]
        scalars["param_steps"] = dict.fromkeys(scalars["param_steps"], self.step)
        tree[ENGINE] = packed(scalars)
        engine.load_state_dict(tree)

    def error(self, what: str) -> PolyaccelError:
        """Return the error of a training state that cannot continue."""
        return PolyaccelError(
            f"a {self.kind} has taken {self.step} steps, {what}",
            hint="to begin with new optimizer states pass the parameters as params= and the transformation as "
            "optimizer=; or resume by the engine's checkpoints",
            value=self.step,
        )


class ResumableEngine(Protocol):
    """An engine, as a training state continues in it."""

    zero: Any

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, tree: Any) -> None: ...

    def train_batch_size(self) -> int: ...


def _overlaid(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """A tree with other arrays by name."""
    return jax.tree_util.tree_map_with_path(lambda path, old: arrays.get(path_name(path) or "params", old), tree)


def taken_apart(model: Any, params: Any, state: Any, optimizer: Any) -> Parts:
    """Return what a `TrainState`, an `nnx.Optimizer` and variables have; what was given apart replaces their parts.

    Raises PolyaccelError for a training state that has taken steps and gets another transformation.
    """
    model, params = function_of_module(model, params)
    model, optimizer, begun = _of_nnx(model, optimizer)
    if _is_train_state(params):
        whole, params = params, params.params
        optimizer, begun = _transformation(optimizer, whole.tx, whole.step, whole.opt_state, params, "TrainState")
        state = _fields(whole, _is_linen(model)) if state is None else state
    if _is_linen(model) and isinstance(params, Mapping) and "params" in params:
        collections = {name: value for name, value in params.items() if name != "params"}
        params = params["params"]
        if state is not None and collections:
            hint = f"leave {', '.join(collections)} out of params, or state out"
            raise PolyaccelError("params has collections, and there is a state too", hint=hint, value=[*collections])
        state = collections or None if state is None else state
    model, optimizer = _of_pairs(model, params, optimizer)
    return Parts(model, params, state, optimizer, begun)


def _of_pairs(model: Any, params: Any, optimizer: Any) -> tuple[Any, Any]:
    """Function and transformation of pairs of fast and slow weights (`optax.lookahead`): the function gets fast ones.

    Raises PolyaccelError for pairs that are given with a module.
    """
    optax: Any = sys.modules.get("optax")
    if optax is None or not isinstance(params, optax.LookaheadParams):
        return model, optimizer
    if _is_linen(model) or isinstance(model, type) or not callable(model):
        hint = "pass a function fn(params, batch, rng), which gets the fast weights"
        raise PolyaccelError("pairs of fast and slow weights of a module", hint=hint, value=type(model).__name__)

    @wraps(model)
    def on_fast(params: Any, *given: Any) -> Any:
        return model(params.fast, *given)

    if optimizer is None:
        return on_fast, None

    @wraps(optimizer.update)
    def update(gradients: Any, *given: Any, **extra: Any) -> Any:
        return optimizer.update(gradients.fast, *given, **extra)

    return on_fast, optax.GradientTransformationExtraArgs(optimizer.init, update)


def _of_nnx(model: Any, optimizer: Any) -> tuple[Any, Any, Begun | None]:
    """Module, transformation and progress of an `nnx.ModelAndOptimizer` or an `nnx.Optimizer`."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return model, optimizer, None
    if isinstance(model, FunctionOfModule):
        module, *found = _of_nnx(model.module, optimizer)
        return replace(model, module=module), *found
    if isinstance(model, nnx.ModelAndOptimizer):
        whole, model = model, model.model
        return model, *_of_optimizer(nnx, model, whole, optimizer)
    if isinstance(model, nnx.Optimizer):
        hint = "pass the module as model= and this as optimizer=, or an nnx.ModelAndOptimizer as model="
        raise PolyaccelError("an nnx.Optimizer has no module", hint=hint, value=type(model).__name__)
    if isinstance(optimizer, nnx.Optimizer) and isinstance(model, nnx.Module):
        return model, *_of_optimizer(nnx, model, optimizer, None)
    return model, optimizer, None


def _of_optimizer(nnx: Any, model: Any, whole: Any, optimizer: Any) -> tuple[Any, Begun | None]:
    params = nnx.state(model, whole.wrt)
    found, begun = _transformation(optimizer, whole.tx, whole.step[...], whole.opt_state, params, "nnx.Optimizer")
    if whole.wrt is nnx.Param or optimizer is not None:
        return found, begun
    own, trained = (_paths_of(nnx.state(model, kind)) for kind in (nnx.Param, whole.wrt))
    if not trained or not trained <= own:
        raise PolyaccelError(
            f"an nnx.Optimizer trains {whole.wrt}, and the engine trains nnx.Param alone",
            hint="give wrt= a kind of nnx.Param that the module has",
            value=str(whole.wrt),
        )
    return _of_these(found, trained), begun  # whose states are those of these parameters, in their order


def _paths_of(state: Any) -> set[str]:
    from flax import nnx

    return {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))}


def _of_these(transformation: Any, names: set[str]) -> Any:
    """A transformation of the parameters with these names, which leaves the others as they are."""
    import optax

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "trained" if path_name(path) in names else "frozen", params
        )

    return optax.partition({"trained": transformation, "frozen": optax.set_to_zero()}, labels)


def _transformation(given: Any, own: Any, step: Any, states: Any, params: Any, kind: str) -> tuple[Any, Begun | None]:
    """The transformation to train with, and the progress. Raises PolyaccelError where another one has to continue."""
    first = jax.tree.leaves(jax.eval_shape(own.init, params))
    found = jax.tree.leaves(states)
    is_first = int(step) == 0 and len(first) == len(found)
    if is_first and found:
        pairs = zip(jax.tree.leaves(own.init(params)), found, strict=True)
        is_first = all(_equal(one, other) for one, other in pairs)
    if is_first:
        return own if given is None else given, None
    begun = Begun(kind, int(step), states)
    if given is not None:
        raise begun.error("and its optimizer states are not those of optimizer=")
    return own, begun


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, jax.Array) and not other.is_fully_addressable:
        return False  # as far as this process sees
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
