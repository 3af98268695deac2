"""The devices that JAX computes on in native mode: those of this process, or of all processes of a job.

One mesh axis, `AXIS`; a device's place on it is its rank, those of a process side by side.

[Note: JAX coordinator address]
JAX has its own service, by which its processes find each other and detect each other's end. Its port is a free
one that rank 0 picks and broadcasts, for MASTER_PORT is taken by the communicator. It must be started
before JAX has looked for devices, which the first array does: `polyaccel.jax.init_distributed` does it early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyaccel import comm
from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.comm.discovery import meeting_address
from polyaccel.errors import CommError, ShardingError
from polyaccel.job.ports import free_port

AXIS = "data"
WHOLE = PartitionSpec()
CUT = PartitionSpec(AXIS)


def init_distributed(**arguments: Any) -> None:
    """Join all ranks, and the processes of JAX too, for `"jax": {"execution": "native"}`. Collective.

    A script whose processes train together calls this before it makes its first array.

    Args:
        **arguments: Arguments of `polyaccel.init_distributed`.

    Raises:
        CommError: An array was made before, or the processes cannot join.
        CommTimeout: Some ranks do not come in time.
    """
    comm.init_distributed(**arguments)
    join_processes(default_communicator())


def join_processes(communicator: Communicator) -> None:
    """Join `communicator`'s processes in JAX if needed. Collective. See [Note: JAX coordinator address]."""
    rank, world_size = communicator.rank, communicator.world_size
    if jax.distributed.is_initialized():
        if (jax.process_index(), jax.process_count()) != (rank, world_size):
            raise CommError(
                f"process {jax.process_index()} of {jax.process_count()} to JAX is rank {rank} of {world_size}",
                hint="leave jax.distributed.initialize out: polyaccel calls it with its own ranks",
                value=jax.process_index(),
            )
        return
    if world_size == 1:
        return
    is_late = communicator.all_gather_object(_has_looked())
    if any(is_late):
        raise CommError(
            f"JAX was used on ranks {[at for at, late in enumerate(is_late) if late]} before its processes connected",
            hint="call polyaccel.jax.init_distributed() before the first array is made",
            value=is_late,
        )
    place = communicator.broadcast_object(f"{meeting_address()}:{free_port()}" if rank == 0 else None)
    index = communicator.accelerator.current_device().index
    own = None if communicator.accelerator.device_count() == 1 else index
    try:
        jax.distributed.initialize(
            place,
            world_size,
            rank,
            local_device_ids=own,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(communicator.timeout_s)),
        )
    except Exception as error:
        raise CommError(
            f"rank {rank} of {world_size} did not reach JAX's service at {place}: {error}",
            hint="see that rank 0's host can be reached there; MASTER_ADDR names it",
            value=place,
        ) from error


def _has_looked() -> bool:
    """Whether JAX has looked for its devices."""
    from jax._src import xla_bridge  # there is no public question

    return bool(xla_bridge.backends_are_initialized())


@dataclass(frozen=True)
class DeviceMesh:
    """All devices, in the order of their ranks, and those of this process."""

    mesh: Mesh
    local: tuple[Any, ...]
    first_rank: int
    """The rank of `local[0]`; the others follow it."""

    @classmethod
    def from_accelerator(cls, accelerator: Accelerator) -> DeviceMesh:
        """Return JAX's devices of the accelerator's kind, equally many a process."""
        try:
            found = jax.devices(accelerator.jax_platform or accelerator.name)
        except RuntimeError as error:
            raise ShardingError(
                f"JAX has no device of the accelerator {accelerator.name!r}: {error}",
                hint="install JAX for it, or name another by DS_ACCELERATOR",
                value=accelerator.name,
            ) from error
        devices = sorted(found, key=lambda device: (device.process_index, device.id))
        counts = [sum(device.process_index == at for device in devices) for at in range(jax.process_count())]
        if len(set(counts)) != 1:
            raise ShardingError(
                f"the processes have {counts} devices",
                hint="let each process see equally many",
                value=counts,
            )
        local = tuple(device for device in devices if device.process_index == jax.process_index())
        return cls(Mesh(np.array(devices), (AXIS,)), local, jax.process_index() * counts[0])

    @property
    def world_size(self) -> int:
        """How many devices there are."""
        return int(self.mesh.size)

    @property
    def is_hosts(self) -> bool:
        """Whether the devices are the processors of several processes."""
        return len(self.local) < self.world_size and self.local[0].platform == "cpu"

    @cached_property
    def whole(self) -> NamedSharding:
        """Every device has all of an array."""
        return NamedSharding(self.mesh, WHOLE)

    @cached_property
    def cut(self) -> NamedSharding:
        """Every device has its equal part of an array's first axis."""
        return NamedSharding(self.mesh, CUT)

    def over_devices(self, parts: Sequence[Any]) -> jax.Array:
        """The array whose first axis is cut over all devices, from the parts of this process's."""
        first = parts[0]
        shape = (first.shape[0] * self.world_size, *first.shape[1:])
        placed = [jax.device_put(part, device) for part, device in zip(parts, self.local, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, self.cut, placed)

    def on_each(self, value: Any) -> jax.Array:
        """The array that every device has as a whole; `value` is equal in all processes."""
        placed = [jax.device_put(value, device) for device in self.local]
        return jax.make_array_from_single_device_arrays(value.shape, self.whole, placed)

    def own_parts(self, array: jax.Array) -> list[jax.Array]:
        """The parts of an array that this process's devices have, in the order of their ranks."""
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        return [by_device[device] for device in self.local]

    def spread(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Map `function` over devices; its collectives must make `WHOLE` results equal, JAX cannot check."""
        over_all: Callable[..., Any] = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return over_all


def native_mesh() -> DeviceMesh:
    """Return the mesh of the default process group's joined processes."""
    communicator = default_communicator()
    join_processes(communicator)
    return DeviceMesh.from_accelerator(communicator.accelerator)
