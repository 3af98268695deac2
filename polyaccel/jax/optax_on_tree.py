"""An optax transformation on whole parameters, for one that cannot run on slices.

That is possible where every rank has all weights and optimizer states: at stage 0, and on one rank. All ranks compute
the same update. The states may have any shape; they rest in arrays of JAX, and a checkpoint holds them as they are.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, ShardingError
from polyaccel.jax.elementwise.evaluate import NotElementwise
from polyaccel.jax.optax_optimizer import OptaxOptimizer, TracedTransformation
from polyaccel.jax.views import array_over
from polyaccel.zero.update.optimizers import Group, Shard, SliceOptimizer


class OptaxOnTree(SliceOptimizer):
    """Runs a transformation on the tree of parameters. Its tiers are resident, and every shard is a whole bucket."""

    def __init__(self, traced: TracedTransformation) -> None:
        self._traced = traced
        self._state: list[Any] | None = None
        """The leaves of the transformation's state; None before the first update."""
        self._apply = jax.jit(self._moved)
        self._begin = jax.jit(lambda tree: jax.tree.leaves(traced.transformation.init(tree)))

    @property
    def kind(self) -> str:
        texts = (jax.tree_util.keystr(path) for path, _ in self._traced.state_paths)
        return "optax on whole parameters: " + ", ".join(texts)

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        ready = list(shards)
        weights, grads = dict[str, Any](), dict[str, Any]()
        for shard in ready:
            shapes = {slot.param.fqn: slot.param.shape for slot in shard.bucket.slots}
            assert shard.grad is not None  # set by the step
            for piece in shard.slices:
                window = (piece.shard_offset, piece.length)
                weights[piece.fqn] = array_over(shard.master.view(*window), shapes[piece.fqn], "master weights")
                grads[piece.fqn] = array_over(shard.grad.view(*window), shapes[piece.fqn], "gradients")
        params = self._traced.tree_of(weights)
        if self._state is None:
            self._state = self._begin(params)
        after, state = jax.block_until_ready(self._apply(self._traced.tree_of(grads), self._state, params, grad_scale))
        self._state = state
        moved = dict(zip(self._traced.names, jax.tree.leaves(after), strict=True))
        for shard in ready:
            compute = shard.tier.compute
            for piece in shard.slices:
                flat = compute.import_array(moved[piece.fqn].reshape(-1))
                shard.master.view(piece.shard_offset, piece.length).copy_from(flat)
            for run in shard.runs:
                shard.write_params(run)
            yield shard

    def _moved(self, grads: Any, state: Sequence[Any], params: Any, scale: Any) -> tuple[Any, list[Any]]:
        wide = jax.tree.map(lambda of, one: of.astype(one.dtype) * jnp.asarray(scale, one.dtype), grads, params)
        return self._traced.update(wide, state, params)

    def states_by_path(self) -> dict[str, Any]:
        """The leaves of the state, by the path that they have in plain optax; none before the first update."""
        paths = (jax.tree_util.keystr(path) for path, _ in self._traced.state_paths)
        return {} if self._state is None else dict(zip(paths, self._state, strict=True))

    def whole_state(self) -> bytes:
        """The state, serialised."""
        held = io.BytesIO()
        leaves = self._state or []
        np.savez(held, *[np.asarray(_as_numbers(leaf)) for leaf in leaves], allow_pickle=False)
        return held.getvalue()

    def read_whole_state(self, data: bytes) -> list[Any] | None:
        """Read what `whole_state` gave. Raises CheckpointError unless it is this transformation's."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as saved:
                found = [saved[f"arr_{at}"] for at in range(len(saved.files))]
            if not found:
                return None
            return [_as_leaf(value, like) for value, (_, like) in zip(found, self._traced.state_paths, strict=True)]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(
                f"the saved state of the optax transformation does not fit: {error}",
                hint="build the transformation that was saved; load_optimizer_states=False begins with a new one",
            ) from error

    def take_whole_state(self, leaves: list[Any] | None) -> None:
        self._state = leaves


def optax_optimizer(
    transformation: Any, params: Any, param_dtype: DType | None, *, may_be_whole: bool, on_slices: bool = True
) -> OptaxOptimizer | OptaxOnTree:
    """Return the optimizer of `transformation` on slices, or whole if `may_be_whole`. Raises ShardingError."""
    traced = TracedTransformation(transformation, params, param_dtype)
    if may_be_whole and not on_slices:
        return OptaxOnTree(traced)
    try:
        return OptaxOptimizer(traced)
    except NotElementwise as error:
        if may_be_whole:
            return OptaxOnTree(traced)
        name = error.name or traced.name
        raise ShardingError(
            f"the optax transformation {name} does not update elements independently ({error}), and this run has no "
            "whole parameters for it",
            hint='use "zero_optimization": {"stage": 0} with "jax": {"execution": "views"} and no stages of a '
            'pipeline, or an elementwise one; clip by norm with "gradient_clipping" of the config, LAMB is in the '
            "config too",
            value=name,
        ) from None


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
