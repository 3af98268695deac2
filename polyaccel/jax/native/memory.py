"""Parameters, master weights and optimizer states on this process's devices in native mode, and their way to and from
host memory.

Parameters are whole on every device; master weights and optimizer states are cut over them, or whole under a replicated
optimizer. The host sees copies: of what is owned, for checkpoints to write, and to be filled from checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from polyaccel.accelerators.memory.numpy import NumpyBuffer, numpy_dtype
from polyaccel.core.buffer import Buffer
from polyaccel.errors import InvariantError
from polyaccel.jax.native.mesh import DeviceMesh
from polyaccel.jax.native.program import Held
from polyaccel.zero.buckets.bucket_params import Replica
from polyaccel.zero.plan.layout import Bucket, ShardLayout, Slot
from polyaccel.zero.plan.policy import DEFAULT_PRECISION, Placement, ZeroPolicy
from polyaccel.zero.update.consistency import Consistency

PARAM = "param"
Publish = Callable[[Mapping[int, Any], Mapping[str, int]], tuple[Any, ...]]


class NativeMemory:
    """Where `layout` rests on `mesh`. `values` has the parameters flat, in the precision that they came in; `starts`
    has for each optimizer state of a trained bucket what it is filled with. `publish` makes parameters of weights that
    have had so many updates."""

    def __init__(
        self,
        mesh: DeviceMesh,
        layout: ShardLayout,
        policy: ZeroPolicy,
        values: Mapping[str, np.ndarray[Any, Any]],
        starts: Callable[[Bucket], Mapping[str, np.ndarray[Any, Any]]],
        publish: Publish,
    ) -> None:
        self.mesh = mesh
        self._layout = layout
        self._is_cut = policy.optim is Placement.SHARDED
        self._publish = publish
        self.consistency = Consistency()
        self.steps: dict[str, int] = {param.fqn: 0 for param in layout.params if param.trainable}
        """How many updates each parameter has had."""
        self._staged: dict[tuple[int, str], list[NumpyBuffer]] = {}
        """Host copies that a checkpoint fills, by bucket and kind: a part for each of the own devices."""
        masters, states, weights = {}, {}, {}
        for bucket in layout.buckets:
            own = bucket.kind.dtype
            master = DEFAULT_PRECISION.master_of(own) if bucket.kind.trainable else own
            precise = np.zeros(bucket.numel, numpy_dtype(master))
            for slot in bucket.slots:
                precise[slot.offset : slot.end] = values[slot.param.fqn]
            bounds = self._parts(bucket)
            weights[bucket.index] = self._place([precise[low:high] for low, high in bounds])
            if master is not own:
                masters[bucket.index] = weights[bucket.index]
            if bucket.kind.trainable:
                states[bucket.index] = {
                    name: self._place([np.full(high - low, start[0], start.dtype) for low, high in bounds])
                    for name, start in starts(bucket).items()
                }
        self.held = Held(publish(weights, self.steps), masters, states)

    def _parts(self, bucket: Bucket) -> list[tuple[int, int]]:
        """The elements [low, high) of a bucket that this process updates: one part a device, or one of all."""
        if not self._is_cut:
            return [(0, bucket.numel)]
        return [bucket.shard_bounds(self.mesh.first_rank + at) for at in range(len(self.mesh.local))]

    def _place(self, parts: list[Any]) -> jax.Array:
        return self.mesh.over_devices(parts) if self._is_cut else self.mesh.on_each(parts[0])

    @contextmanager
    def given_up(self) -> Iterator[Held]:
        """Lend the arrays to a program that replaces them; after an error they are gone."""
        with self.consistency.changing("an update"):
            yield self.for_update()

    def for_update(self) -> Held:
        """Return all arrays that an update replaces."""
        return self.held

    def wait_all_gathers(self) -> None:
        """Nothing to wait for: an array of JAX is never written to."""

    # To and from the host.

    def replicas(self, most_numel: int) -> tuple[Replica, ...]:
        """None: JAX has the memory, and moves it between the devices of all processes."""
        return ()

    def replica_bytes(self, piece: Replica) -> bytes:
        raise InvariantError("nothing is compared of arrays that JAX has", value=piece)

    def local_shards(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """Yield (slot, kind, start, buffer) of this process's pieces, like `ZeroEngine.local_shards`."""
        for bucket in self._layout.buckets:
            for kind, array in self.kinds(bucket).items():
                parts = self._on_host(bucket, array)
                for at in range(len(self.mesh.local)):
                    low, high = bucket.shard_bounds(self.mesh.first_rank + at)
                    part, origin = (parts[at], low) if self._is_cut else (parts[0], 0)
                    for slot, start, offset, length in _inside(bucket, low, high):
                        yield slot, kind, start, part.view(offset - origin, length)

    def shards_to_load(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """(slot, kind, start, buffer) of what this process updates, with its present contents, to be overwritten."""
        self._staged.clear()
        for bucket in self._layout.buckets:
            for kind, array in self.kinds(bucket).items():
                copies = [NumpyBuffer(np.array(part.raw)) for part in self._on_host(bucket, array)]
                self._staged[bucket.index, kind] = copies
                for copy, (low, high) in zip(copies, self._parts(bucket), strict=True):
                    for slot, start, offset, length in _inside(bucket, low, high):
                        yield slot, kind, start, copy.view(offset - low, length)

    def all_gather_masters(self) -> None:
        """Take over the values that were filled in, and make the parameters of them. Collective."""
        weights = {}
        masters, states = dict(self.held.masters), {index: dict(each) for index, each in self.held.states.items()}
        for (index, kind), copies in self._staged.items():
            placed = self._taken(index, [copy.raw for copy in copies])
            if kind != PARAM:
                states[index][kind] = placed
                continue
            weights[index] = placed
            if index in masters:
                masters[index] = placed
        self._staged.clear()
        self.held = Held(self._publish(weights, self.steps), masters, states, self.held.tree)

    def _taken(self, index: int, parts: list[Any]) -> jax.Array:
        """A bucket's array on the devices, from the parts of it that this process updates."""
        return self._place(parts)

    def close(self) -> None:
        """Release the arrays."""
        self._staged.clear()
        self.held = Held((), {}, {})

    def kinds(self, bucket: Bucket) -> dict[str, jax.Array]:
        """A bucket's weights, in the best precision there is, and optimizer states."""
        weights = self.held.masters.get(bucket.index, self.held.params[bucket.index])
        return {PARAM: weights, **self.held.states.get(bucket.index, {})}

    def flat(self, bucket: Bucket, array: jax.Array) -> jax.Array:
        """An array of a bucket's elements, flat."""
        return array

    def _on_host(self, bucket: Bucket, array: jax.Array) -> list[NumpyBuffer]:
        """Return this process's parts of an array on the host; zeros where a failed update lost them."""
        bounds = self._parts(bucket)
        if array.is_deleted():
            return [NumpyBuffer(np.zeros(high - low, array.dtype)) for low, high in bounds]
        parts = [np.asarray(part) for part in self.mesh.own_parts(array)]
        if len(parts[0]) == bucket.numel:  # whole on every device
            return [NumpyBuffer(parts[0][low:high]) for low, high in bounds]
        return [NumpyBuffer(part) for part in parts]


def _inside(bucket: Bucket, low: int, high: int) -> Iterator[tuple[Slot, int, int, int]]:
    """(slot, start in the parameter, offset in the bucket, length) of what lies in its elements [low, high)."""
    for slot in bucket.slots:
        begin, end = max(low, slot.offset), min(high, slot.end)
        if begin < end:
            yield slot, begin - slot.offset, begin, end - begin
