"""Sharded parameters while they are whole: gathered when something needs them, or ahead of that, and freed after use.

[Note: Views that outlive their bucket]
Gathered memory serves the next bucket as soon as it is free. Somebody may still hold a view: a state dict made inside
`GatheredParameters`, a transposed weight that a layer keeps for its backward. Such memory is recognised by the number
of references to it, and left to its holder instead.

[Note: Holds]
Whoever needs a bucket whole holds it (`hold`) and drops it afterwards; holds nest. A bucket that nobody holds is idle:
it is freed at once, or kept while its next use is near. What "near" means follows from the order in which the last step
held its buckets: the same order is expected again, gives prefetching its targets, and tells how many elements will be
held before a bucket is needed once more. An order that deviates is served on demand: the same collectives happen, only
not ahead. Every rank sees the same holds in the same order, so every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from logging import INFO, WARNING, getLogger
from math import inf

from polyaccel.buffer import Buffer
from polyaccel.comm.base import CallInfo, Communicator, DoneWork, Work
from polyaccel.errors import InvariantError, ShardingError
from polyaccel.offload.tier import Tier
from polyaccel.zero.layout import Bucket
from polyaccel.zero.pool import BufferPool

log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatherPolicy:
    """Bounds on gathered parameters, in elements.

    `max_live_numel`: gathered at any time, as long as what is held at once allows it. `prefetch_numel`: gathered ahead
    of their use. `max_reuse_numel`: an idle bucket whose next use comes within so many elements is kept.
    `warn_of_deviations`: say in every step that its order was another one, and not only once and in passing.
    """

    max_live_numel: int = 1_000_000_000
    prefetch_numel: int = 50_000_000
    max_reuse_numel: int = 1_000_000_000
    warn_of_deviations: bool = False


class UseOrder:
    """The order in which buckets were held in the last step, and where the present step stands in it."""

    def __init__(self, numels: Mapping[int, int], *, warn: bool) -> None:
        self._numels = numels
        self._warn = warn
        self._learned: list[int] = []
        self._present: list[int] = []
        self._position = 0
        self._has_deviated = False
        self._is_changing = self._may_deviate = False

    def note(self, index: int) -> None:
        """Bucket `index` is used now."""
        self._present.append(index)
        if not self._learned:
            return
        try:
            expected = self._learned.index(index, self._position)
        except ValueError:
            expected = -1
        if expected != self._position and not self._has_deviated and not self._may_deviate:
            self._has_deviated = True
            level = WARNING if self._warn else INFO
            log.log(level, "buckets are used in another order than in the last step; they are gathered on demand")
        if expected >= 0:
            self._position = expected + 1

    def upcoming(self) -> Iterator[int]:
        """The buckets that come next, nearest first, if the order holds."""
        yield from self._learned[self._position :]

    def distance(self, index: int) -> float:
        """Elements that will be used before bucket `index` is; infinite if it is not expected again."""
        passed = 0
        for upcoming in self.upcoming():
            if upcoming == index:
                return passed
            passed += self._numels[upcoming]
        return inf

    def end_step(self) -> None:
        """The step is over: expect its order from now on."""
        if self._present:
            self._learned, self._present = self._present, []
        self._position = 0
        self._has_deviated &= not self._warn
        self._may_deviate, self._is_changing = self._is_changing, False

    def will_change(self) -> None:
        """A use was found out in this step, and will come earlier in the next one: no reason to tell anybody."""
        self._is_changing = True


class ShardedBucket:
    """One bucket's parameters where they are sharded: this rank's slice for good, all of it only while needed.

    `source` is the tier that `own` rests in, off the device; None for one on the device, which is used as it is.
    """

    def __init__(self, bucket: Bucket, own: Buffer, source: Tier | None) -> None:
        self.bucket = bucket
        self.own = own
        self.source = source
        self.full: Buffer | None = None
        self.work: Work | None = None
        self.holds = 0
        self.is_ahead = False
        """Gathered before anybody needed it."""
        self.references = 0
        """To the memory of `full` when it was lent."""


class Gathering:
    """Makes sharded `buckets` whole and frees them again.

    `on_bound(bucket, full)` and `on_freed(bucket)` tell the frontend where parameters stand, and that they stand
    nowhere now. `waiting` is entered around waits for other ranks.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        policy: GatherPolicy,
        communicator: Communicator,
        on_bound: Callable[[Bucket, Buffer], None],
        on_freed: Callable[[Bucket], None],
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._buckets = {place.bucket.index: place for place in buckets}
        self._policy = policy
        self._communicator = communicator
        self._on_bound = on_bound
        self._on_freed = on_freed
        self._waiting = waiting
        self._pool = BufferPool(communicator, policy.max_live_numel)
        numels = {index: place.bucket.numel for index, place in self._buckets.items()}
        self._order = UseOrder(numels, warn=policy.warn_of_deviations)
        self.live_numel = 0
        """Elements gathered at present, those under way included."""
        self.peak_numel = 0
        self.is_suspended = False
        """The ranks' slices are elsewhere; nothing can be gathered."""
        self._ahead_numel = 0

    def __contains__(self, index: int) -> bool:
        return index in self._buckets

    def full(self, index: int) -> Buffer:
        """The whole bucket. Raises ShardingError while it is sharded."""
        place = self._buckets[index]
        if place.full is None or place.work is not None:
            raise ShardingError(f"bucket {index} is sharded at present", cure="hold it first", value=index)
        return place.full

    def is_whole(self, index: int) -> bool:
        place = self._buckets[index]
        return place.full is not None and place.work is None

    def whole_or_none(self, index: int) -> Buffer | None:
        """The bucket if it stands somewhere as a whole, held or not; a gather under way is waited for."""
        place = self._buckets[index]
        if place.work is not None:
            self._settle(place)
        return place.full

    def hold(self, index: int, *, learn: bool = True) -> None:
        """Make bucket `index` whole until a matching `drop`. Collective. `learn`: the use is part of a training
        step. Raises ShardingError while gathering is suspended."""
        place = self._buckets[index]
        self._require_active(index)
        if place.holds == 0 and learn:
            self._order.note(index)
        place.holds += 1
        if place.full is None:
            self._make_room(place.bucket.numel)
            self._launch(place)
        if place.work is not None:
            self._settle(place)
        if learn:
            self._prefetch()

    def drop(self, index: int, *, keep: bool = True) -> None:
        """Undo one `hold`. The bucket is freed once nobody holds it, unless it may be kept and its next use is near."""
        place = self._buckets[index]
        if place.holds == 0:
            raise InvariantError(f"bucket {index} was dropped more often than held", value=index)
        place.holds -= 1
        if place.holds == 0 and not (keep and self._is_worth_keeping(index)):
            self._free(place)

    def refresh(self, index: int) -> None:
        """This rank's slice has new values: free the bucket, or gather it again if somebody holds it. Collective."""
        place = self._buckets[index]
        if place.full is None:
            return
        if place.work is not None:
            self._settle(place)
        if place.holds == 0:
            self._free(place)
        elif not self._is_own(place):
            self._start_gather(place, place.full, async_op=False)

    @contextmanager
    def peek(self, index: int) -> Iterator[Buffer]:
        """The whole bucket, to be read at once, while the frontend sees its parameters where they are. Collective,
        unless it is whole already."""
        place = self._buckets[index]
        self._require_active(index)
        if (whole := self.whole_or_none(index)) is not None or self._is_own(place):
            yield place.own if whole is None else whole
            return
        self._make_room(place.bucket.numel)
        self._count_live(place.bucket.numel)
        full = self._pool.acquire(place.bucket.numel, place.own.dtype)
        try:
            self._start_gather(place, full, async_op=False)
            yield full
        finally:
            self._count_live(-place.bucket.numel)
            self._pool.release(full)

    def free_idle(self) -> None:
        """Free everything that nobody holds, prefetched buckets too: parameters are about to change, or a step
        ended."""
        for place in self._buckets.values():
            if place.holds == 0 and place.full is not None:
                if place.work is not None:
                    self._settle(place)
                self._free(place)

    def will_change_order(self) -> None:
        """The next step uses buckets in another order than this one, and rightly so."""
        self._order.will_change()

    def suspend(self) -> None:
        """Free everything and gather nothing until `is_suspended` is False again. Raises ShardingError if something is
        held."""
        self.require_idle()
        self.free_idle()
        self.is_suspended = True

    def trim(self) -> None:
        """Free what nobody holds, and give the memory back."""
        self.free_idle()
        self._pool.trim()

    def end_step(self) -> None:
        """The optimizer step is over: what was gathered is stale, and the next step begins.

        Raises ShardingError if something is held still.
        """
        self.require_idle()
        self.free_idle()
        self._order.end_step()

    def require_idle(self) -> None:
        """Raise ShardingError if somebody holds a bucket."""
        held = [index for index, place in self._buckets.items() if place.holds]
        if held:
            raise ShardingError(
                f"buckets {held} are gathered and in use",
                cure="leave GatheredParameters (and forward or backward passes) first",
                value=held,
            )

    def close(self) -> None:
        """Free everything, also what is held."""
        for place in self._buckets.values():
            place.holds = 0
        self.free_idle()

    def _is_worth_keeping(self, index: int) -> bool:
        near = self._order.distance(index) <= self._policy.max_reuse_numel
        return near and self.live_numel <= self._policy.max_live_numel

    def _make_room(self, numel: int) -> None:
        """Free idle buckets, those needed last first, until `numel` more elements fit; what is held stays."""
        idle = [index for index, place in self._buckets.items() if place.holds == 0 and place.full is not None]
        idle.sort(key=self._order.distance)
        while idle and self.live_numel + numel > self._policy.max_live_numel:
            place = self._buckets[idle.pop()]
            if place.work is not None:
                self._settle(place)
            self._free(place)

    def _prefetch(self) -> None:
        for index in self._order.upcoming():
            place = self._buckets[index]
            if place.full is not None:
                continue
            numel = place.bucket.numel
            within = self._ahead_numel + numel <= self._policy.prefetch_numel
            if not within or self.live_numel + numel > self._policy.max_live_numel:
                return
            self._launch(place)
            self._ahead_numel += numel
            place.is_ahead = True

    def _require_active(self, index: int) -> None:
        if self.is_suspended:
            raise ShardingError("parameters are offloaded", cure="call engine.reload_states() first", value=index)

    def _count_live(self, numel: int) -> None:
        self.live_numel += numel
        self.peak_numel = max(self.peak_numel, self.live_numel)

    def _launch(self, place: ShardedBucket) -> None:
        self._count_live(place.bucket.numel)
        if self._is_own(place):
            place.full, place.work = place.own, DoneWork()
            return
        place.full = self._pool.acquire(place.bucket.numel, place.own.dtype)
        place.references = place.full.references()
        place.work = self._start_gather(place, place.full, async_op=True)

    def _start_gather(self, place: ShardedBucket, full: Buffer, *, async_op: bool) -> Work:
        """Gather into `full`. A slice off the device is read to its place in `full` and gathered from there, so that
        it needs no other memory."""
        own = place.own
        if place.source is not None:
            low, high = place.bucket.shard_bounds(self._communicator.rank)
            own = full.view(low, high - low)
            place.source.read(place.own, own)
        info = CallInfo("parameters", place.bucket.index)
        return self._communicator.all_gather(full, own, async_op=async_op, info=info)

    def _settle(self, place: ShardedBucket) -> None:
        """Finish the gather under way and let the frontend see the parameters."""
        assert place.work is not None  # the callers' condition
        assert place.full is not None
        with self._waiting():
            place.work.wait()
        place.work = None
        self._ahead_numel -= place.bucket.numel * place.is_ahead
        place.is_ahead = False
        self._on_bound(place.bucket, place.full)

    def _free(self, place: ShardedBucket) -> None:
        assert place.full is not None  # the callers' condition
        self._on_freed(place.bucket)
        if not self._is_own(place):
            is_kept = place.full.references() > place.references
            (self._pool.forget if is_kept else self._pool.release)(place.full)
        place.full = None
        self._count_live(-place.bucket.numel)

    @staticmethod
    def _is_own(place: ShardedBucket) -> bool:
        """Whether the own slice is the bucket: on a single rank nothing is gathered, nor copied if it is on the
        device."""
        return place.source is None and place.own.numel == place.bucket.numel
