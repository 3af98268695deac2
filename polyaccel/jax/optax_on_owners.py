"""An optax transformation on whole parameters that are cut over ranks: each is updated by the rank that owns it.

Slices of gradients and master weights go to the owners, which hold the states of their parameters, and new weights come
back as slices. What depends on several parameters is exchanged (`polyaccel.jax.owners.placement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from logging import getLogger
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.jax.elementwise.graph import Graph
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.owners.exchange import Owners, Place, SliceExchange, gather_values
from polyaccel.jax.owners.placement import Holder, Placement, RankPrograms
from polyaccel.jax.traced_transformation import TracedTransformation
from polyaccel.jax.views import array_over
from polyaccel.zero.update.optimizers import Group, Shard

log = getLogger(__name__)
_FEW = 65_536
"""Elements that owners may send in an update without a warning."""


class OptaxOnOwners(WholeStates):
    """Runs a transformation on the `owners` of parameters, whose shards are cut over ranks or are with other stages."""

    def __init__(self, traced: TracedTransformation, owners: Owners) -> None:
        super().__init__(traced)
        self._among, self._rank = owners, owners.ranks.rank
        self.owners = owners.of
        """The rank that updates each of the caller's parameters."""
        self.place: Place = lambda fqn, start: (fqn, start)
        """Where an element of the engine's parameter stands in the caller's."""
        self._tree = jax.eval_shape(lambda: traced.tree_of({}))
        self._of_params = [self.owners[fqn] for fqn in traced.names]
        state = [leaf for _, leaf in traced.state_paths]
        scale = jax.ShapeDtypeStruct((), np.float32)
        self._graph = Graph.trace(self._moved, self._tree, state, self._tree, scale, traced.loss_shape, selects=True)
        self._placed = self._settle()
        if self._rank == 0 and (sent := self._placed.sent_elements()) > _FEW:
            message = "operations of %s need several whole parameters: all ranks get %d elements more in each update"
            log.warning(message, traced.name, sent)

    def _moved(self, grads: Any, state: Sequence[Any], params: Any, scale: Any, loss: Any) -> tuple[Any, list[Any]]:
        wide = jax.tree.map(lambda one: one * jnp.asarray(scale, one.dtype), grads)
        return self.traced.update(wide, state, params, loss)

    def _settle(self) -> Placement:
        """Find the holder of every leaf of the state: the owner of the parameter whose path it has, or the rank where
        its new value is computed, or all."""
        places = jax.tree_util.tree_flatten_with_path(self._tree)[0]
        owned = {path: self.owners[fqn] for (path, _), fqn in zip(places, self.traced.names, strict=True)}
        for_all = set(self.traced.hyperparams.values())
        holders: list[Holder] = []
        for at, (path, _) in enumerate(self.traced.state_paths):
            ends = (path[end:] for end in range(len(path) + 1) if at not in for_all)
            holders.append(next((owned[end] for end in ends if end in owned), None))
        count = len(self._of_params)
        while True:
            rest = [None] * (len(self._graph.inputs) - 2 * count - len(holders))
            placed = Placement(self._graph, [*self._of_params, *holders, *self._of_params, *rest])
            after = list(holders)
            for at, atom in enumerate(self._graph.outputs[count:]):
                made = placed.holder(atom)
                if made is not None and made != holders[at]:
                    after[at] = made if holders[at] is None and at not in for_all else None
                    if after[at] is None:
                        for_all.add(at)
            if after == holders:
                self.holders = holders
                return placed
            holders = after

    @cached_property
    def _programs(self) -> RankPrograms:
        return self._placed.programs_of(self._rank, [*self._of_params, *self.holders])

    def states_by_path(self, communicator: Communicator) -> dict[str, Any]:
        """As `WholeStates.states_by_path`, over the ranks that exchange values."""
        return super().states_by_path(self._among.ranks)

    def state_blobs(self, rank: int) -> dict[str, bytes]:
        """As `WholeStates.state_blobs`."""
        return self.blobs_of(self._state or [], self._rank) if self._among.saves else {}

    def _is_held(self, holder: Holder) -> bool:
        return holder is None or holder == self._rank

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        loss = self.mean_loss(communicator)
        ready, exchanges = list[Shard](), list[SliceExchange]()
        weights, grads = dict[str, Buffer](), dict[str, Buffer]()
        for shard in shards:
            assert shard.grad is not None  # set by the step
            ready.append(shard)
            if self._among.in_step is None:
                for piece in shard.slices:
                    window = (piece.shard_offset, piece.length)
                    weights[piece.fqn], grads[piece.fqn] = shard.master.view(*window), shard.grad.view(*window)
                continue
            exchange = SliceExchange(communicator, shard.bucket, self._among.in_step, self.place)
            self._collect(exchange, shard, shard.master, weights, "master weights to owners")
            self._collect(exchange, shard, shard.grad, grads, "gradients to owners")
            exchanges.append(exchange)
        moved = self._run(self._arrays(weights), self._arrays(grads), grad_scale, loss, self._among.ranks)
        weights.clear()
        grads.clear()
        if self._among.in_step is None:
            yield from self._written(ready, moved)
            return
        for shard, exchange in zip(ready, exchanges, strict=True):
            compute = shard.tier.compute
            places = {self.place(slot.param.fqn, 0)[0] for slot in shard.bucket.slots}
            whole = {name: compute.import_array(moved[name].reshape(-1)) for name in places & moved.keys()}
            exchange.from_owners(whole, shard.master, "master weights from owners")
            for run in shard.runs:
                shard.write_params(run)
            yield shard

    @staticmethod
    def _written(shards: Sequence[Shard], moved: dict[str, Any]) -> Iterator[Shard]:
        """Shards with their new weights, which this rank computed all."""
        for shard in shards:
            for piece in shard.slices:
                flat = shard.tier.compute.import_array(moved[piece.fqn].reshape(-1))
                shard.master.view(piece.shard_offset, piece.length).copy_from(flat)
            for run in shard.runs:
                shard.write_params(run)
            yield shard

    def _collect(
        self, exchange: SliceExchange, shard: Shard, source: Buffer, whole: dict[str, Buffer], label: str
    ) -> None:
        """Receive the slices of `source` that this rank owns in the buffers `whole`. Collective."""
        for name, start, piece in exchange.to_owners(source, label):
            if name not in whole:
                numel = prod(self.traced.shapes[self.traced.names.index(name)].shape)
                whole[name] = shard.tier.compute.allocate(numel, source.dtype)
            whole[name].view(start, piece.numel).copy_from(piece)

    def _arrays(self, whole: dict[str, Buffer]) -> list[Any]:
        """The arrays of this rank's parameters in tree order, zeros for those that are not trained."""
        found: list[Any] = []
        for name, like in zip(self.traced.names, self.traced.shapes, strict=True):
            if self.owners[name] != self._rank:
                found.append(None)
            elif name in whole:
                found.append(array_over(whole[name], like.shape, f"parameter {name!r}").astype(like.dtype))
            else:
                found.append(jnp.zeros(like.shape, like.dtype))
        return found

    def _run(
        self, weights: list[Any], grads: list[Any], scale: float, loss: float, communicator: Communicator
    ) -> dict[str, Any]:
        """Update the states, and return this rank's new parameters by name. Collective."""
        exchange = partial(gather_values, communicator, label="optax")
        if self._state is None:
            init = Graph.trace(self.traced.transformation.init, self._tree, selects=True)
            begin = Placement(init, self._of_params).programs_of(self._rank, self.holders)
            found = begin.run(weights, exchange)
            likes = (like for _, like in self.traced.state_paths)
            self._state = [
                None if value is None else jnp.asarray(value, like.dtype)
                for value, like in zip(found, likes, strict=True)
            ]
            self._set_chosen(self._state)
        given = [np.float32(scale), *([np.float32(loss)] if self.traced.takes_loss else [])]
        after = jax.block_until_ready(self._programs.run([*grads, *self._state, *weights, *given], exchange))
        count = len(self._of_params)
        self._state = after[count:]
        names = zip(self.traced.names, after[:count], strict=True)
        return {name: value for name, value in names if value is not None}
