"""Which parameter an element of a device's slice belongs to.

Slots begin at multiples of `ROW_NUMEL` elements, and so do shards (`zero.layout`, [Note: Padding]). So a table with one
entry a row is enough, and a sum over a parameter's elements is one over rows first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.jax.native_mesh import AXIS
from polyaccel.zero.layout import ALIGNMENT_ITEMSIZE, ALIGNMENT_NBYTES, Bucket

ROW_NUMEL = ALIGNMENT_NBYTES // ALIGNMENT_ITEMSIZE


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
        """The squared norm of each parameter, over all devices; `values` has an element of each of the slice."""
        sums = jnp.sum(jnp.square(values.reshape(-1, ROW_NUMEL)), axis=1)
        own = jax.ops.segment_sum(sums, self._owners, num_segments=self._count, indices_are_sorted=True)
        return jax.lax.psum(own, AXIS) if self._is_cut else own

    def indices(self) -> Any:
        """Each element's index in its parameter, modulo 2**32."""
        offsets = np.array([slot.offset for slot in self._bucket.slots], np.uint64).astype(np.uint32)
        low = jax.lax.axis_index(AXIS) * self._numel if self._is_cut else 0
        return jax.lax.iota(jnp.uint32, self._numel) + jnp.uint32(low) - self.spread(jnp.asarray(offsets))

    def spread(self, values: Any) -> Any:
        """A value a parameter as a value an element; what is one number already stays one."""
        if jnp.ndim(values) == 0:
            return values
        rows = values[self._owners]
        return jnp.broadcast_to(rows[:, None], (rows.shape[0], ROW_NUMEL)).reshape(-1)
