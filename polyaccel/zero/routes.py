"""The communicators that carry sharded parameters and gradients, and second copies among near ranks.

[Note: Second copies]
Where some ranks reach each other faster than the rest (those of a host), they keep what was gathered first in a step
among them, each a slice, and gather it from each other when it is needed again: in the backward pass, and in later
micro-batches (ZeRO++, Wang et al. 2023, section 3.2). The values are those of the first gather, bit for bit. The copy
is forgotten whenever parameters change.
"""

from __future__ import annotations

from dataclasses import dataclass
from logging import getLogger

from polyaccel.buffer import Buffer
from polyaccel.comm.base import CallInfo, Communicator, Work
from polyaccel.zero.layout import Bucket

log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Routes:
    """`trained` and `frozen` gather parameters for passes, `gradients` reduces, `exact` does all else, over the same
    ranks; `near` joins this rank's neighbours that keep a second copy, None where nobody does."""

    exact: Communicator
    trained: Communicator
    frozen: Communicator
    gradients: Communicator
    near: Communicator | None = None

    @classmethod
    def plain(cls, communicator: Communicator) -> Routes:
        """Everything as it is."""
        return cls(communicator, communicator, communicator, communicator)

    def say_nothing_is_gathered(self) -> None:
        """Tell, once, whoever asked for another way of gathering that there is nothing to gather."""
        altered = self.near is not None or self.trained is not self.exact or self.frozen is not self.exact
        if altered and self.exact.rank == 0:
            log.info(
                "no parameters are gathered, for they are persistent or in memory that the ranks share: "
                "zero_quantized_weights, zero_quantized_nontrainable_weights and zero_hpz_partition_size change nothing"
            )

    def of_passes(self, bucket: Bucket) -> Communicator:
        """What gathers `bucket` for forward and backward passes."""
        return self.trained if bucket.kind.trainable else self.frozen

    def are_exact(self, bucket: Bucket) -> bool:
        """Whether passes get the values of the slices."""
        return self.of_passes(bucket) is self.exact

    def close(self) -> None:
        """Leave the group of near ranks, which nobody else has."""
        if self.near is not None:
            self.near.close()


class SecondCopies:
    """This rank's slices of gathered buckets. See [Note: Second copies]. Without `near` it keeps nothing."""

    def __init__(self, near: Communicator | None) -> None:
        self._near = near
        self._slices: dict[int, Buffer] = {}
        self._kept: dict[int, bool] = {}
        """The buckets that are kept, and whether their values are exact."""

    def keep(self, bucket: Bucket, full: Buffer, *, is_exact: bool) -> None:
        """Keep this rank's slice of `full`, unless there is one."""
        if self._near is None or bucket.index in self._kept:
            return
        numel = bucket.numel // self._near.world_size
        own = self._slices.get(bucket.index)
        if own is None:
            own = self._slices[bucket.index] = self._near.allocate(numel, full.dtype)
        own.copy_from(full.view(self._near.rank * numel, numel))
        self._kept[bucket.index] = is_exact

    def gather(self, bucket: Bucket, full: Buffer, *, exact: bool, async_op: bool) -> Work | None:
        """Start to gather the bucket into `full`; None if it is not kept, or not in exact values that are asked for."""
        if self._near is None or bucket.index not in self._kept or (exact and not self._kept[bucket.index]):
            return None
        info = CallInfo("parameters of near ranks", bucket.index)
        return self._near.all_gather(full, self._slices[bucket.index], async_op=async_op, info=info)

    def forget(self, index: int) -> None:
        """Bucket `index` has changed. Every rank does this alike."""
        self._kept.pop(index, None)

    def forget_all(self) -> None:
        self._kept.clear()

    def trim(self) -> None:
        """Forget all and give the memory back."""
        self._kept.clear()
        self._slices.clear()
