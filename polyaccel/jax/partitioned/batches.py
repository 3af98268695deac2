"""A process's batch as its part of arrays over a script's mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.jax.partitioned.places import Partition
from polyaccel.jax.program.batches import WeakNumbers, as_inputs, is_weak, samples_of


def parts_of_process(partition: Partition) -> int:
    """Return the number of parts of a batch that this process has."""
    where = NamedSharding(partition.mesh, _of_samples(partition))
    indices = where.addressable_devices_indices_map((partition.data_size,))
    return len({str(index) for index in indices.values()})


def require_same_samples(partition: Partition, batch: Any, communicator: Communicator) -> None:
    """Raise PolyaccelError where processes with one part of a batch pass different samples. Collective.

    JAX would train on an array whose copies differ.
    """
    leaves = jax.tree.leaves(as_inputs(batch))
    own = tuple(crc32(np.asarray(leaves[at]).tobytes()) for at in samples_of(batch))
    first: dict[str, tuple[int, Any]] = {}
    for rank, (part, found) in enumerate(communicator.all_gather_object((_parts_of(partition), own))):
        other, expected = first.setdefault(part, (rank, found))
        if found != expected:
            raise PolyaccelError(
                f"processes {other} and {rank} have the same part of a batch, and got different samples",
                hint=f"cut batches in {partition.data_size} parts, one for each place along {partition.batch_axes}: "
                "processes along other axes of the mesh pass the same samples",
                value=(other, rank),
            )


def _parts_of(partition: Partition, process: int | None = None) -> str:
    """Which parts of a batch the devices of a process have; None: of this one."""
    process = jax.process_index() if process is None else process
    where = NamedSharding(partition.mesh, _of_samples(partition)).devices_indices_map((partition.data_size,))
    return str(sorted({str(index) for device, index in where.items() if device.process_index == process}))


def shares_parts(partition: Partition) -> bool:
    """Return whether several processes have one part of a batch."""
    processes = {device.process_index for device in partition.mesh.devices.flat}
    return len({_parts_of(partition, process) for process in processes}) < len(processes)


def placed_batch(partition: Partition, batch: Any) -> Any:
    """Return the inputs of a batch over the mesh. What is replicated is whole there, and equal in all processes."""
    cut = samples_of(batch)
    leaves, structure = jax.tree.flatten(as_inputs(batch))
    places = [_of_samples(partition) if at in cut else PartitionSpec() for at in range(len(leaves))]
    pairs = zip(leaves, places, strict=True)
    return jax.tree.unflatten(structure, [_placed(leaf, NamedSharding(partition.mesh, spec)) for leaf, spec in pairs])


def placed_steps(partition: Partition, steps: Sequence[Sequence[Any]]) -> Any:
    """Return the inputs of the micro-batches of steps of equal shapes over the mesh, behind axes over steps and
    micro-batches."""
    cut = samples_of(steps[0][0])
    each, (structure, *_) = zip(*(jax.tree.flatten(as_inputs(one)) for step in steps for one in step), strict=True)
    found = []
    for at, values in enumerate(zip(*each, strict=True)):
        is_number = is_weak(values[0])
        if isinstance(values[0], jax.Array) and jax.process_count() == 1:
            whole: Any = jnp.stack([jax.device_put(value, partition.mesh.devices.flat[0]) for value in values])
        else:
            kind = jnp.result_type(values[0]) if is_number else None
            whole = np.stack([np.asarray(value, kind) for value in values])
        whole = whole.reshape(len(steps), len(steps[0]), *whole.shape[1:])
        spec = PartitionSpec(None, None, *(_of_samples(partition) if at in cut else ()))
        value = _placed(whole, NamedSharding(partition.mesh, spec))
        found.append(WeakNumbers(value) if is_number and not isinstance(value, WeakNumbers) else value)
    return jax.tree.unflatten(structure, found)


def _of_samples(partition: Partition) -> PartitionSpec:
    return PartitionSpec(partition.batch_axes) if partition.batch_axes else PartitionSpec()


def _placed(leaf: Any, place: NamedSharding) -> Any:
    value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, jnp.result_type(leaf))
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.device_put(value, place)
    if jax.process_count() == 1:
        found = jax.device_put(value, place)
    else:
        found = jax.make_array_from_process_local_data(place, np.asarray(value))
    return WeakNumbers(found) if is_weak(leaf) else found
