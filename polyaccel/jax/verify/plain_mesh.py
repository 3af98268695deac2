"""Programs of plain JAX over a script's mesh of several processes, none of which can run the function alone.

All processes run them together, as plain `jax.jit` does there: parameters are whole on every device, and the batch is
cut over them. Each process has the whole results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from polyaccel.jax.partitioned.batches import placed_batch
from polyaccel.jax.partitioned.places import Partition
from polyaccel.jax.partitioned.program import InsideMesh
from polyaccel.jax.program.batches import as_inputs
from polyaccel.jax.rewrites import RewriteContext


class WholeOnMesh:
    """A function compiled for all devices of a mesh, whose results are whole in each process. Collective."""

    def __init__(self, partition: Partition, function: Callable[..., Any], kernels: Callable[..., Any]) -> None:
        self._whole = NamedSharding(partition.mesh, PartitionSpec())
        self._jitted = InsideMesh(partition, kernels(function, out_shardings=self._whole))

    def __call__(self, *arguments: Any) -> Any:
        found = self._jitted(*jax.tree.map(self._placed, arguments))
        return jax.tree.map(lambda value: value.addressable_data(0), found)

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf  # of a batch
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self._placed(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, self._whole, lambda index: value[index])


def compiled_of(given: RewriteContext, kernels: Callable[..., Any]) -> Callable[..., Any]:
    """Return what compiles the script's function: `kernels` for one device of this process, in the script's context."""
    partition = given.partition
    if partition is None:
        return kernels
    if jax.process_count() > 1:
        return lambda function: WholeOnMesh(partition, function, kernels)
    return lambda function: InsideMesh(partition, kernels(function))


def inputs_of(given: RewriteContext) -> Callable[[Any], Any]:
    """Return what makes the inputs of the function's programs of a batch."""
    partition = given.partition
    if partition is None or jax.process_count() == 1:
        return as_inputs
    return lambda batch: placed_batch(partition, batch)
