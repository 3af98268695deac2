"""Rows of a device's slice, by which each element finds the parameter that it belongs to, and how it is rounded.

Slots begin at multiples of `ROW_NUMEL` elements, and so do shards (`zero.layout`, [Note: Bucket padding]). So a table
with one entry a row is enough, and a sum over a parameter's elements is one over rows first.

Parameters of 16 bits are rounded stochastically to the same bits as on any other device: a key for each parameter and
update decides them (`polyaccel.zero.buckets.rounding`). The host passes the keys to the program, so that nothing is
compiled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.jax.native.mesh import AXIS
from polyaccel.ops.jax import narrowed
from polyaccel.ops.rounding import halves
from polyaccel.zero.buckets.rounding import rounding_of
from polyaccel.zero.plan.layout import ALIGNMENT_ITEMSIZE, ALIGNMENT_NBYTES, Bucket

ROW_NUMEL = ALIGNMENT_NBYTES // ALIGNMENT_ITEMSIZE


class ParamRows(Protocol):
    """What an update of a part of some parameters asks of them."""

    def square_sums(self, values: Any) -> Any:
        """The squared norm of each parameter; `values` has an element of each of the part."""

    def spread(self, values: Any) -> Any:
        """One value for each parameter as one for each element; a single number stays one."""

    def indices(self) -> Any:
        """Each element's index in its parameter, modulo 2**32."""


class Rows:
    """The rows of one device's slice of `bucket`, or of the whole bucket; made while JAX traces."""

    def __init__(self, bucket: Bucket, *, is_cut: bool) -> None:
        self._bucket = bucket
        self._count = len(bucket.slots)
        self._is_cut = is_cut
        owners = np.zeros(bucket.numel // ROW_NUMEL, np.int32)
        for index, slot in enumerate(bucket.slots):
            owners[slot.offset // ROW_NUMEL :] = index  # and the padding behind it, which is zeros
        self._owners: Any = jnp.asarray(owners)
        self._numel = bucket.shard_numel if is_cut else bucket.numel
        if is_cut:
            rows = bucket.shard_numel // ROW_NUMEL
            self._owners = jax.lax.dynamic_slice_in_dim(self._owners, jax.lax.axis_index(AXIS) * rows, rows)

    def square_sums(self, values: Any) -> Any:
        """As `ParamRows.square_sums`, over all devices."""
        sums = jnp.sum(jnp.square(values.reshape(-1, ROW_NUMEL)), axis=1)
        own = jax.ops.segment_sum(sums, self._owners, num_segments=self._count, indices_are_sorted=True)
        return jax.lax.psum(own, AXIS) if self._is_cut else own

    def indices(self) -> Any:
        """As `ParamRows.indices`."""
        offsets = np.array([slot.offset for slot in self._bucket.slots], np.uint64).astype(np.uint32)
        low = jax.lax.axis_index(AXIS) * self._numel if self._is_cut else 0
        return jax.lax.iota(jnp.uint32, self._numel) + jnp.uint32(low) - self.spread(jnp.asarray(offsets))

    def spread(self, values: Any) -> Any:
        """As `ParamRows.spread`."""
        if jnp.ndim(values) == 0:
            return values
        rows = values[self._owners]
        return jnp.broadcast_to(rows[:, None], (rows.shape[0], ROW_NUMEL)).reshape(-1)


class RoundingKeys(NamedTuple):
    """For each parameter of a bucket: the halves of its key, and whether it has one. Without one it is rounded to
    nearest."""

    low: Any
    high: Any
    is_random: Any


def rounding_keys(bucket: Bucket, steps: Mapping[str, int]) -> RoundingKeys:
    """The keys of a bucket after `steps` updates of each parameter."""
    found = [rounding_of(slot.param, steps[slot.param.fqn]) for slot in bucket.slots]
    keys = [(0, 0) if rounding is None else halves(rounding.key) for rounding in found]
    low, high = (np.array(half, np.uint32) for half in zip(*keys, strict=True))
    return RoundingKeys(low, high, np.array([rounding is not None for rounding in found]))


def rounded(weights: Any, dtype: Any, keys: RoundingKeys, rows: ParamRows) -> Any:
    """The weights of a device's slice in `dtype`. To be traced by JAX."""
    random = narrowed(weights, dtype, rows.spread(keys.low), rows.spread(keys.high), rows.indices())
    return jnp.where(rows.spread(keys.is_random), random, weights.astype(dtype))
