"""Parameters, master weights and optimizer states as leaves on a mesh, and their way to and from host memory.

A checkpoint has flat parts of parameters. A leaf becomes one that is cut evenly over all devices when the host asks
for it, and is let go then, so a checkpoint fits any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.jax.native.memory import NativeMemory
from polyaccel.jax.native.program import Held
from polyaccel.jax.optax_on_mesh import OptaxOnMesh
from polyaccel.jax.partitioned.places import LeafPlaces
from polyaccel.jax.partitioned.program import PartitionedProgram
from polyaccel.zero.plan.layout import Bucket, ShardLayout
from polyaccel.zero.plan.policy import DEFAULT_PRECISION
from polyaccel.zero.update.consistency import Consistency


class PartitionedMemory(NativeMemory):
    """Where the leaves of `layout` rest, as `places` says: `NativeMemory` of buckets with one parameter each."""

    def __init__(
        self,
        places: LeafPlaces,
        layout: ShardLayout,
        program: PartitionedProgram,
        optimizer: OptaxOnMesh | None,
        values: Mapping[str, np.ndarray[Any, Any]],
        starts: Callable[[Bucket], Mapping[str, np.ndarray[Any, Any]]],
    ) -> None:
        self.mesh = places.devices
        self._layout = layout
        self._is_cut = True  # as the host sees it
        self._publish = program.publish
        self._program = program
        self._optimizer = optimizer
        self._places = places
        self.consistency = Consistency()
        self.steps = {param.fqn: 0 for param in layout.params if param.trainable}
        self._staged = {}
        self._flat = jax.jit(self._flattened, static_argnums=1, out_shardings=places.devices.cut)
        masters, states, weights = {}, {}, {}
        for bucket in layout.buckets:
            (slot,) = bucket.slots
            own, place = bucket.kind.dtype, places.stored[slot.param.fqn]
            master = DEFAULT_PRECISION.master_of(own) if bucket.kind.trainable else own
            value = values[slot.param.fqn].astype(numpy_dtype(master)).reshape(slot.param.shape)
            weights[bucket.index] = _placed(value, place)
            if master is not own:
                masters[bucket.index] = weights[bucket.index]
            if bucket.kind.trainable:
                states[bucket.index] = {
                    name: _placed(np.full(slot.param.shape, start[0], start.dtype), place)
                    for name, start in starts(bucket).items()
                }
        self.held = Held(program.publish(weights, self.steps), masters, states)

    @contextmanager
    def given_up(self) -> Iterator[Held]:
        with super().given_up() as held:
            yield held
            if self._optimizer is not None:
                self._optimizer.replace(self.held.tree)
                self.held = self.held._replace(tree=None)

    def for_update(self) -> Held:
        if self._optimizer is None:
            return self.held
        return self.held._replace(tree=self._optimizer.begin(lambda: self._program.begin(self.held)))

    def kinds(self, bucket: Bucket) -> dict[str, jax.Array]:
        """A bucket's arrays, flat and cut over all devices. Collective."""
        return {kind: self.flat(bucket, leaf) for kind, leaf in super().kinds(bucket).items()}

    def flat(self, bucket: Bucket, array: jax.Array) -> jax.Array:
        """A leaf as one that is flat and cut over all devices. Collective."""
        return array if array.is_deleted() else self._flat(array, bucket.index)

    def _taken(self, index: int, parts: list[Any]) -> jax.Array:
        (slot,) = self._layout.buckets[index].slots
        shape, place = slot.param.shape, self._places.stored[slot.param.fqn]
        unflat = jax.jit(lambda flat: jax.device_put(flat[: slot.param.numel].reshape(shape), place))
        leaf: jax.Array = unflat(self._place(parts))
        return leaf

    def _flattened(self, leaf: Any, index: int) -> Any:
        bucket = self._layout.buckets[index]
        here = jax.device_put(leaf, self._places.state[bucket.slots[0].param.fqn])
        return jnp.pad(here.reshape(-1), (0, bucket.numel - leaf.size))


def _placed(value: np.ndarray[Any, Any], place: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, place, lambda index: value[index])
