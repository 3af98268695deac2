"""A transformation of optax whose states are whole arrays of JAX, of any shape, and how a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.checkpoint.convert.trees import OPTAX, OWNED_OPTAX, blob_of, files_of
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.jax.elementwise.evaluate import evaluate
from polyaccel.jax.elementwise.graph import Node
from polyaccel.jax.optax_optimizer import TransformationOptimizer
from polyaccel.jax.owners.exchange import gather_values
from polyaccel.jax.owners.placement import Holder
from polyaccel.jax.traced_transformation import TracedTransformation


class WholeStates(TransformationOptimizer):
    """An optimizer with the state of a transformation: all leaves, or those that a rank owns."""

    holders: Sequence[Holder]
    """The rank that has each leaf; None where all have it."""

    def __init__(self, traced: TracedTransformation) -> None:
        super().__init__(traced)
        self._state: list[Any] | None = None
        """The leaves of the transformation's state, None for those of other ranks; None before the first update."""
        self._chosen: dict[int, float] = {}
        """Numbers that were set before the first update."""

    @property
    def kind(self) -> str:
        return "optax on whole parameters: " + ", ".join(self._paths)

    @property
    def _paths(self) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in self.traced.state_paths]

    def number(self, at: int) -> float:
        if self._state is not None:
            return float(self._state[at])
        (start,) = evaluate(self.traced.init, [self.traced.init.outputs[at]], {})
        return self._chosen.get(at, float(start.value))

    def set_number(self, at: int, value: float) -> None:
        self._chosen[at] = value
        if self._state is not None:
            self._set_chosen(self._state)

    def _set_chosen(self, state: list[Any]) -> None:
        """Overwrite numbers of `state` by those that were set."""
        for at, value in self._chosen.items():
            state[at] = jnp.asarray(value, self.traced.state_paths[at][1].dtype)
        self._chosen.clear()

    def states_by_path(self, communicator: Communicator) -> dict[str, Any]:
        """Return the leaves by their path in plain optax, none before the first update. Collective."""
        if self._state is None:
            return {}
        values = dict(enumerate(self._state))
        likes = [Node(at, like.shape, like.dtype) for at, (_, like) in enumerate(self.traced.state_paths)]
        wanted = [(held, like) for held, like in zip(self.holders, likes, strict=True) if held is not None]
        gather_values(communicator, wanted, values, "a comparison")
        return dict(zip(self._paths, (values[at] for at in range(len(values))), strict=True))

    def resting_nbytes(self) -> int:
        """Return the bytes of the states on this rank."""
        return sum(int(leaf.nbytes) for leaf in self._state or () if leaf is not None)

    def state_blobs(self, rank: int) -> dict[str, bytes]:
        """The states that `rank`, this one, saves. Collective."""
        return self.blobs_of(self._state or [], rank)

    def blobs_of(self, leaves: Sequence[Any], rank: int) -> dict[str, bytes]:
        """The blobs that `rank` saves of these leaves."""
        mine = {
            f"state{path}": np.asarray(_as_numbers(leaf))
            for path, leaf, at in zip(self._paths, leaves, self.holders, strict=False)
            if (rank == 0 if at is None else at == rank)
        }
        if rank and not mine:
            return {}
        return {f"{OWNED_OPTAX}{rank}" if rank else OPTAX: blob_of(mine)}

    def named_states(self, leaves: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return all leaves of a state by the names of `state_blobs`, as it has them."""
        pairs = zip(self._paths, leaves, strict=True)
        return {f"state{path}": np.asarray(_as_numbers(jnp.asarray(leaf))) for path, leaf in pairs}

    def first_states(self, params: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the state with which the transformation begins at these parameters, as `named_states`."""
        traced = self.traced
        each = zip(traced.names, traced.shapes, traced.is_trained, strict=True)
        tree = traced.tree_of({name: jnp.asarray(params[name], like.dtype) for name, like, trains in each if trains})
        leaves = jax.tree.leaves(traced.transformation.init(tree))
        for at, value in self._chosen.items():
            leaves[at] = value
        return self.named_states(leaves)

    def read_states(self, blobs: Mapping[str, bytes]) -> list[Any] | None:
        """Read what `state_blobs` gave on all ranks. Raises CheckpointError unless it is this transformation's."""
        try:
            found = files_of(blobs)
            if not found:
                return None
            keys = [f"state{path}" for path in self._paths]
            if "arr_0" in found:  # all leaves in order
                keys = [f"arr_{at}" for at in range(len(keys))]
            filled = {key for key, (_, like) in zip(keys, self.traced.state_paths, strict=True) if like.size}
            if not filled <= set(found) <= set(keys):
                raise ValueError(f"it has {len(found)} states with other names")
            return [
                (_as_leaf(found[key][key], like) if key in found else jnp.zeros(like.shape, like.dtype))
                if self._is_held(held)
                else None
                for key, (_, like), held in zip(keys, self.traced.state_paths, self.holders, strict=True)
            ]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(
                f"the saved state of the optax transformation does not fit: {error}",
                hint="build the transformation that was saved; load_optimizer_states=False begins with a new one",
            ) from error

    def _is_held(self, holder: Holder) -> bool:
        """Whether this rank has what `holder` has."""
        return holder is None

    def take_states(self, leaves: list[Any] | None) -> None:
        self._state = leaves
        self._chosen.clear()


def _as_numbers(leaf: Any) -> Any:
    """A leaf in a type that numpy can save."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.random.key_data(leaf)
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4 else leaf


def _as_leaf(value: Any, like: Any) -> Any:
    """The leaf that `_as_numbers` made `value` of. Raises ValueError for another shape."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=str(jax.random.key_impl(jax.random.key(0))))
    if value.shape != like.shape:
        raise ValueError(f"an array of shape {value.shape} is not a state of shape {like.shape}")
    return jnp.asarray(value, like.dtype)
