"""How parameters of 16 bits are rounded stochastically in native mode: to the bits that any other device has.

What decides is a key for each parameter and update (`polyaccel.zero.rounding`). The host tells the program the keys,
so that nothing is compiled anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyaccel.jax.native_rows import Rows
from polyaccel.ops.jax_rounding import narrowed
from polyaccel.ops.random_bits import halves
from polyaccel.zero.layout import Bucket
from polyaccel.zero.rounding import rounding_of


class RoundingKeys(NamedTuple):
    """Of each parameter of a bucket: the halves of its key, and whether it has one; without, it goes to nearest."""

    low: Any
    high: Any
    is_random: Any


def rounding_keys(bucket: Bucket, steps: Mapping[str, int]) -> RoundingKeys:
    """The keys of a bucket after `steps` updates of each parameter."""
    found = [rounding_of(slot.param, steps[slot.param.fqn]) for slot in bucket.slots]
    keys = [(0, 0) if rounding is None else halves(rounding.key) for rounding in found]
    low, high = (np.array(half, np.uint32) for half in zip(*keys, strict=True))
    return RoundingKeys(low, high, np.array([rounding is not None for rounding in found]))


def rounded(weights: Any, dtype: Any, keys: RoundingKeys, rows: Rows) -> Any:
    """The weights of a device's slice in `dtype`. To be traced by JAX."""
    random = narrowed(weights, dtype, rows.spread(keys.low), rows.spread(keys.high), rows.indices())
    return jnp.where(rows.spread(keys.is_random), random, weights.astype(dtype))
