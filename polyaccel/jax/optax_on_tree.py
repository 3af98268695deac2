"""An optax transformation on whole parameters, for one that cannot run on slices.

Where every rank has all weights and optimizer states, at stage 0 and on one rank, all ranks compute the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.jax.elementwise.evaluate import NotElementwise
from polyaccel.jax.optax_on_mesh import OptaxOnMesh
from polyaccel.jax.optax_on_owners import OptaxOnOwners
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.owners.exchange import Owners
from polyaccel.jax.traced_transformation import TracedTransformation
from polyaccel.jax.views import array_over
from polyaccel.zero.update.optimizers import Group, Shard


class OptaxOnTree(WholeStates):
    """Runs a transformation on the tree of parameters. Its tiers are resident, and every shard is a whole bucket."""

    def __init__(self, traced: TracedTransformation) -> None:
        super().__init__(traced)
        self.holders = [None] * len(traced.state_paths)
        self._apply = jax.jit(self._moved)
        self._begin = jax.jit(lambda tree: jax.tree.leaves(traced.transformation.init(tree)))

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        loss = self.mean_loss(communicator)
        ready = list(shards)
        weights, grads = dict[str, Any](), dict[str, Any]()
        for shard in ready:
            shapes = {slot.param.fqn: slot.param.shape for slot in shard.bucket.slots}
            assert shard.grad is not None  # set by the step
            for piece in shard.slices:
                window = (piece.shard_offset, piece.length)
                weights[piece.fqn] = array_over(shard.master.view(*window), shapes[piece.fqn], "master weights")
                grads[piece.fqn] = array_over(shard.grad.view(*window), shapes[piece.fqn], "gradients")
        params = self.traced.tree_of(weights)
        if self._state is None:
            self._state = self._begin(params)
            self._set_chosen(self._state)
        given = self.traced.tree_of(grads), self._state, params, grad_scale, loss
        after, self._state = jax.block_until_ready(self._apply(*given))
        moved = dict(zip(self.traced.names, jax.tree.leaves(after), strict=True))
        for shard in ready:
            compute = shard.tier.compute
            for piece in shard.slices:
                flat = compute.import_array(moved[piece.fqn].reshape(-1))
                shard.master.view(piece.shard_offset, piece.length).copy_from(flat)
            for run in shard.runs:
                shard.write_params(run)
            yield shard

    def _moved(self, grads: Any, state: Sequence[Any], params: Any, scale: Any, loss: Any) -> tuple[Any, list[Any]]:
        wide = jax.tree.map(lambda of, one: of.astype(one.dtype) * jnp.asarray(scale, one.dtype), grads, params)
        return self.traced.update(wide, state, params, jnp.asarray(loss, jnp.float32))


def optax_optimizer(
    transformation: Any,
    params: Any,
    param_dtype: DType | None,
    *,
    may_be_whole: bool,
    on_slices: bool = True,
    owners: Callable[[], Owners] | None,
) -> OptaxOptimizer | OptaxOnTree | OptaxOnOwners | OptaxOnMesh:
    """Return the optimizer of `transformation` on slices, or on whole parameters: on all ranks if `may_be_whole`, on
    `owners`, or without them on a mesh. Raises ShardingError."""
    traced = TracedTransformation(transformation, params, param_dtype)
    if may_be_whole and not on_slices:
        return OptaxOnTree(traced)
    try:
        return OptaxOptimizer(traced)
    except NotElementwise:
        if may_be_whole:
            return OptaxOnTree(traced)
        return OptaxOnMesh(traced) if owners is None else OptaxOnOwners(traced, owners())
