"""Memory for many gathered buckets at once, allocated before any of them is gathered."""

from __future__ import annotations

from collections.abc import Iterable

from polyaccel.zero.buckets.gathered_buckets import GatheredBuckets


def missing_nbytes(gathered: GatheredBuckets, indices: Iterable[int]) -> dict[int, int]:
    """Return the bytes that this rank must allocate to have these buckets whole, by bucket."""
    sharded = [gathered[index] for index in indices]
    return {
        one.bucket.index: one.bucket.numel * one.own.dtype.itemsize
        for one in sharded
        if one.full is None and not one.is_own
    }


def reserve(gathered: GatheredBuckets, indices: Iterable[int]) -> None:
    """Allocate what gathers of these buckets need. Raises what the accelerator raises, and keeps nothing then."""
    borrowed = []
    try:
        for index in missing_nbytes(gathered, indices):
            sharded = gathered[index]
            borrowed.append(gathered.pool.acquire(sharded.bucket.numel, sharded.own.dtype))
    except BaseException:
        for buffer in borrowed:
            gathered.pool.forget(buffer)
        raise
    for buffer in borrowed:
        gathered.pool.release(buffer)
