"""An optax transformation of whole parameters on a mesh: JAX's partitioner computes it where its arrays are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from polyaccel.comm.base import Communicator
from polyaccel.errors import InvariantError
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.pytree import path_name
from polyaccel.jax.traced_transformation import TracedTransformation
from polyaccel.zero.plan.layout import Bucket
from polyaccel.zero.update.optimizers import Group, Shard


class Places(Protocol):
    """Where arrays are on a mesh."""

    state: dict[str, NamedSharding]

    def of_state(self, shape: tuple[int, ...]) -> NamedSharding:
        """The place of an array that belongs to no single parameter."""

    def rest(self, place: NamedSharding) -> NamedSharding:
        """Where what is updated at `place` rests."""


class OptaxOnMesh(WholeStates):
    """The state of a transformation in native mode. A program of all devices makes its updates."""

    def __init__(self, traced: TracedTransformation) -> None:
        super().__init__(traced)
        self.holders = [None] * len(traced.state_paths)
        self.places: list[NamedSharding] = []
        """Where each leaf of the state is updated."""
        self.stored: list[NamedSharding] = []
        """Where each leaf of the state rests."""

    def settle(self, places: Places) -> None:
        """Find the places: those of the parameter whose path and shape a leaf has, or what fits its shape."""
        shapes = {name: one.shape for name, one in zip(self.traced.names, self.traced.shapes, strict=True)}
        self.places, self.stored = [], []
        for path, leaf in self.traced.state_paths:
            ends = (path_name(path[at:]) for at in range(len(path)))
            name = next((end for end in ends if shapes.get(end) == leaf.shape), None)
            place = places.of_state(leaf.shape) if name is None else places.state[name]
            self.places.append(place)
            self.stored.append(places.rest(place) if leaf.ndim else place)

    def terms(self, group: Group, step: int) -> tuple[()]:
        """None: as `SliceUpdate.terms`."""
        return ()

    def variant(self, group: Group, bucket: Bucket) -> None:
        """None: as `SliceUpdate.variant`."""
        return

    def begin(self, make: Callable[[], list[Any]]) -> list[Any]:
        """Return the leaves for an update, made by `make` before the first one."""
        if self._state is None:
            self._state = make()
            self._set_chosen(self._state)
        return self._state

    def replace(self, leaves: list[Any]) -> None:
        """Take the leaves after an update."""
        self._state = leaves

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        raise InvariantError("a transformation on a mesh updates no shards", value=self.traced.name)

    def states_by_path(self, communicator: Communicator) -> dict[str, Any]:
        return dict(zip(self._paths, map(_on_host, self._state or ()), strict=False))

    def resting_nbytes(self) -> int:
        return sum(shard.data.nbytes for leaf in self._state or () for shard in leaf.addressable_shards)

    def state_blobs(self, rank: int) -> dict[str, bytes]:
        """As `WholeStates.state_blobs`. Collective."""
        return self.blobs_of([_on_host(leaf) for leaf in self._state or ()], rank)

    def take_states(self, leaves: list[Any] | None) -> None:
        if leaves is not None:
            leaves = [_placed(leaf, place) for leaf, place in zip(leaves, self.stored, strict=True)]
        super().take_states(leaves)


def _placed(leaf: Any, place: NamedSharding) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.device_put(leaf, place)
    value = np.asarray(leaf)
    return jax.make_array_from_callback(value.shape, place, lambda index: value[index])


def _on_host(leaf: jax.Array) -> Any:
    """A leaf as every process has it."""
    if leaf.is_fully_addressable:
        return leaf
    whole = NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
    # Without `out_shardings` a result that is an argument keeps its place, whatever device_put says.
    return jax.jit(lambda one: one, out_shardings=whole)(leaf).addressable_data(0)
