"""The form of the state that a function carries from micro-batch to micro-batch, and how a program takes it.

A function with state is `fn(params, state, batch, rng)`. It returns `(loss, new_state)`, or `(loss, (new_state, aux))`
as `jax.value_and_grad(fn, has_aux=True)` has it. A program gets the state as flat data in front of the batch, and gives
the new data with the auxiliary output. `StateForm` and `Carried` are the names to read first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.errors import PolyaccelError
from polyaccel.jax.pytree import path_name

_CONVENTION = "return (loss, new_state), or (loss, (new_state, aux)); new_state has the structure of state"


class Carried(NamedTuple):
    """A batch, and the flat data of the state before it."""

    state: Sequence[Any]
    batch: Any


class Result(NamedTuple):
    """The flat data of the state after a batch, and the function's auxiliary output."""

    state: list[Any]
    aux: Any


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """An array of the state as programs carry it: for random keys their data, and `key` is their implementation."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    key: Any

    @property
    def is_inexact(self) -> bool:
        """Whether its values can be averaged."""
        return bool(jnp.issubdtype(self.dtype, jnp.inexact))


class StateForm:
    """Structure, shapes and types of a state, from its first value `tree`.

    Raises PolyaccelError for a leaf that is not an array.
    """

    def __init__(self, tree: Any) -> None:
        paths, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.leaves = tuple(_leaf_of(path_name(path) or "state", leaf) for path, leaf in paths)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and types of a state's data."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def host_data(self, tree: Any) -> list[np.ndarray[Any, Any]]:
        """Return copies of a state's arrays. Raises PolyaccelError for another structure, shape or type."""
        if not self._fits(tree):
            raise self._other_structure(tree, "the state")
        pairs = zip(self.leaves, jax.tree.leaves(tree), strict=True)
        return [np.array(_data(leaf, value, "the state"), leaf.dtype, order="C") for leaf, value in pairs]

    def tree(self, data: Sequence[Any]) -> Any:
        """Return the state of `data` as the function gets it."""
        values = [
            value if leaf.key is None else jax.random.wrap_key_data(value, impl=leaf.key)
            for leaf, value in zip(self.leaves, data, strict=True)
        ]
        return jax.tree.unflatten(self.structure, values)

    def split(self, found: Any) -> tuple[Any, Result]:
        """Return (loss, result) of what the function returned. Raises PolyaccelError for another form."""
        if not isinstance(found, tuple) or len(found) != 2:
            kind = returned_kind(found)
            raise PolyaccelError(
                f"the function returned a {kind} where (loss, new state) was expected", hint=_CONVENTION, value=kind
            )
        loss, second = found
        is_pair = isinstance(second, tuple) and len(second) == 2
        new, aux = second, None
        if not self._fits(second):
            if not is_pair or not self._fits(second[0]):
                raise self._other_structure(second[0] if is_pair else second, "the new state")
            new, aux = second
        return loss, Result(self.new_data(new), aux)

    def new_data(self, tree: Any) -> list[Any]:
        """Return the data of a new state. Raises PolyaccelError for another structure, shape or type."""
        if not self._fits(tree):
            raise self._other_structure(tree, "the new state")
        pairs = zip(self.leaves, jax.tree.leaves(tree), strict=True)
        return [_data(leaf, value, "the new state") for leaf, value in pairs]

    def zeros(self) -> list[Any]:
        """Return the data of a state of zeros, for shapes alone."""
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def _fits(self, tree: Any) -> bool:
        """Whether a tree has this structure, or containers of other types with the same names."""
        return bool(jax.tree.structure(tree) == self.structure) or _names(tree) == [leaf.name for leaf in self.leaves]

    def _other_structure(self, tree: Any, what: str) -> PolyaccelError:
        own, found = [leaf.name for leaf in self.leaves], _names(tree)
        missing, added = [name for name in own if name not in found], [name for name in found if name not in own]
        differences = {"missing": missing[:8], "not in state": added[:8]}
        shown = "; ".join(f"{how}: {', '.join(names)}" for how, names in differences.items() if names)
        return PolyaccelError(
            f"{what} has another structure than state=: {shown or jax.tree.structure(tree)}",
            hint=_CONVENTION,
            value=found,
        )


def returned_kind(found: Any) -> str:
    """Describe what a function returned, for an error."""
    has_length = isinstance(found, (tuple, list, dict))
    return f"{type(found).__name__} of {len(found)}" if has_length else type(found).__name__


def with_new_state(found: Any, state: Any) -> Any:
    """A loss, or (loss, auxiliary output), together with the new state."""
    is_pair = isinstance(found, tuple) and len(found) == 2
    return (found[0], (state, found[1])) if is_pair else (found, state)


_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def _leaf_of(name: str, value: Any) -> StateLeaf:
    key, data = _key_and_data(name, value)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(jnp.result_type(data)))
    return StateLeaf(name, tuple(np.shape(data)), dtype, key)


def _key_and_data(name: str, value: Any) -> tuple[Any, Any]:
    """The implementation of random keys and their data; (None, value) of another array."""
    if not isinstance(value, _ARRAYS):
        kind = type(value).__name__
        raise PolyaccelError(
            f"state {name!r} is a {kind}, not an array",
            hint="keep what is not an array out of state: close over it, or use equinox.partition",
            value=kind,
        )
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_impl(value), jax.random.key_data(value)
    return None, value


def _data(leaf: StateLeaf, value: Any, what: str) -> Any:
    """The data of a leaf's new value. Raises PolyaccelError for another shape or type."""
    key, data = _key_and_data(leaf.name, value)
    dtype, shape = jnp.result_type(data), tuple(np.shape(data))
    if isinstance(data, (bool, int, float, complex)) or getattr(data, "weak_type", False):
        dtype = jnp.result_type(data, jnp.zeros((), leaf.dtype))  # a number of Python takes the state's type
    if isinstance(data, (np.ndarray, np.generic)):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    if (key, shape, dtype) != (leaf.key, leaf.shape, leaf.dtype):
        raise PolyaccelError(
            f"{what} has {leaf.name!r} as {dtype}{list(shape)}, and the state before as {leaf.dtype}{list(leaf.shape)}",
            hint="keep shapes and types from call to call: value.astype(old.dtype)",
            value=leaf.name,
        )
    return jnp.asarray(data, leaf.dtype)


def _names(tree: Any) -> list[str]:
    return [path_name(path) or "state" for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
