"""Sharded parameters while they are whole: gathered when something needs them, or ahead of that, and freed after use.

[Note: Views after reshard]
Gathered memory serves the next bucket as soon as it is free. A caller may still hold a view: a state dict made inside
`GatheredParameters`, a transposed weight that a layer keeps for its backward. Such memory is left to its holder: its
number of references shows it.

[Note: Bucket holds]
The ranks together hold a bucket (`unshard`) and drop it afterwards; holds nest. A bucket without holds is idle: it is
freed at once, or kept while its next use is near: the schedule of the step gives the targets of prefetching, and the
elements that will be held before a bucket is needed again. All ranks make the same holds and drops in the same order.

[Note: Rank-local bucket use]
Which of these buckets a rank itself computes with is its own affair (`begin_use`, `end_use`;
`zero.buckets.unsharder` makes holds of them that all ranks follow). What the ranks free while one of them
still uses it stays with that rank, bound to its parameters, until it is done; it counts nowhere.

[Note: Shard read-ahead]
A shard that rests in a file is read before its bucket can be gathered, and how long that takes is each rank's own
affair: a gather launched when the file happens to be there would meet other gathers in another order on another rank.
So prefetching such a bucket has two beginnings, each at a hold. The first reserves its memory and starts to read. The
gather follows when the next units begin (at the first hold after something was dropped), waiting for its own file only,
or when the bucket is needed, if that is earlier. The bounds on what is gathered hold from the first beginning on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from polyaccel.comm.work import DoneWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.errors import InvariantError, ShardingError
from polyaccel.offload.tier import DoneFetch, Fetch
from polyaccel.zero.buckets.param_listener import ParamListener
from polyaccel.zero.buckets.secondary_shards import SecondaryShards
from polyaccel.zero.buckets.sharded_bucket import RetainedBucket, ShardedBucket
from polyaccel.zero.plan.gather_schedule import GatherSchedule
from polyaccel.zero.plan.policy import GatherPolicy
from polyaccel.zero.plan.pool import BufferPool
from polyaccel.zero.resources import Communicators


class GatheredBuckets:
    """The sharded `buckets` that are whole at present, and their memory.

    `owner` sees where parameters stand. `waiting` is entered around waits for other ranks. `Unsharder` moves on in
    `schedule`, which is only read here.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        policy: GatherPolicy,
        communicators: Communicators,
        owner: ParamListener,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._buckets = {sharded.bucket.index: sharded for sharded in buckets}
        self._policy = policy
        self._communicators = communicators
        self.second = SecondaryShards(communicators)
        self._owner = owner
        self._waiting = waiting
        self.pool = BufferPool(communicators.world.allocate, policy.max_live_numel)
        self.schedule = GatherSchedule({index: sharded.bucket.numel for index, sharded in self._buckets.items()})
        self.live_numel = 0
        """Elements gathered at present, those under way included; the same on all ranks."""
        self.kept_numel = 0
        """Further elements that this rank keeps."""
        self._apart_numel = 0
        """The most further elements that any rank keeps, where the ranks have just exchanged them."""
        self.peak_numel = 0
        self.is_suspended = False
        """The ranks' slices are elsewhere; nothing can be gathered."""
        self._ahead_numel = 0
        self._period = 0
        """Grows with every hold that follows a drop: each period works on other units than the one before."""
        self._has_dropped = False
        if not buckets:
            communicators.log_ignored_gather_options()

    def __contains__(self, index: int) -> bool:
        return index in self._buckets

    def __getitem__(self, index: int) -> ShardedBucket:
        return self._buckets[index]

    def full(self, index: int) -> Buffer:
        """The whole bucket. Raises ShardingError while it is sharded."""
        sharded = self._buckets[index]
        whole = sharded.full if sharded.kept is None else sharded.kept.full
        if whole is None or not self.is_whole(index):
            raise ShardingError(f"bucket {index} is sharded at present", hint="hold it first", value=index)
        return whole

    def is_whole(self, index: int) -> bool:
        """Whether this rank has the bucket."""
        sharded = self._buckets[index]
        return sharded.kept is not None or sharded.is_whole

    def is_exact(self, index: int) -> bool:
        """Whether a gathered bucket has the values of the slices, not what a quantised gather leaves of them."""
        sharded = self._buckets[index]
        return sharded.is_exact if sharded.kept is None else sharded.kept.is_exact

    def unsharded_or_none(self, index: int) -> Buffer | None:
        """The whole bucket if there is one, held or not. Waits for a gather under way and cancels a fetch."""
        sharded = self._buckets[index]
        whole = self._common_or_none(sharded)
        return whole if sharded.kept is None else sharded.kept.full

    def _common_or_none(self, sharded: ShardedBucket) -> Buffer | None:
        """The same of what the ranks have gathered together."""
        if sharded.fetch is not None:
            self._free(sharded)
        if sharded.work is not None:
            self._settle(sharded)
        return sharded.full

    # Uses by this rank.

    def begin_use(self, index: int) -> bool:
        """Hold a bucket until `end_use`; return whether it is whole, after a gather under way."""
        sharded = self._buckets[index]
        self._require_active(index)
        if sharded.work is not None and sharded.kept is None:
            self._settle(sharded)
        sharded.uses += 1
        return self.is_whole(index)

    def end_use(self, index: int) -> None:
        """Undo one `begin_use`. What the ranks have freed in the meantime goes with the last one."""
        sharded = self._buckets[index]
        if sharded.uses == 0:
            raise InvariantError(f"the use of bucket {index} ended more often than it began", value=index)
        sharded.uses -= 1
        if sharded.uses == 0 and sharded.kept is not None:
            self._let_go(sharded, sharded.kept)

    # Holds by all ranks.

    def unshard(self, index: int, *, ahead: bool = False, exact: bool = False) -> None:
        """Unshard a bucket until `reshard`, gather `ahead`, `exact` without quantisation. Collective."""
        sharded = self._buckets[index]
        self._require_active(index)
        self._period += self._has_dropped
        self._has_dropped = False
        if sharded.full is None:
            self._make_room(sharded.bucket.numel)
            self._begin(sharded, exact=exact)
        if sharded.fetch is not None:
            self._launch(sharded)
        sharded.holds += 1
        self._end_ahead(sharded)
        try:
            if sharded.work is not None:
                self._settle(sharded)
            if exact and sharded.full is not None and not sharded.is_exact:
                sharded.is_exact = True
                fetch = self._start_fetch(sharded, sharded.full)
                self._gather(sharded, sharded.full, fetch, exact=True, async_op=False)
            if ahead:
                self._prefetch()
        except BaseException:
            sharded.holds -= 1  # a caller that failed to get it will not drop it
            raise

    def reshard(self, index: int, *, keep: bool = True) -> None:
        """Undo one `unshard`. The last one frees the bucket, unless it may be kept and its next use is near."""
        sharded = self._buckets[index]
        if sharded.holds == 0:
            raise InvariantError(f"bucket {index} was dropped more often than held", value=index)
        sharded.holds -= 1
        self._has_dropped = True
        if sharded.holds == 0 and not (keep and self._is_worth_keeping(index)):
            self._free(sharded)

    def lend_once(self, indices: Iterable[int], apart_numel: int, *, exact: bool) -> None:
        """Gather buckets for ranks that use them, each of which keeps at most `apart_numel` for itself. Collective."""
        self._apart_numel = apart_numel
        try:
            for index in indices:
                self.unshard(index, exact=exact)
                self.reshard(index)
        finally:
            self._apart_numel = 0

    def refresh(self, index: int) -> None:
        """This rank's slice has new values: free the bucket, or gather it again if it is held. Collective."""
        sharded = self._buckets[index]
        self.second.forget(index)
        if sharded.full is None:
            return
        if sharded.holds == 0:
            self._free(sharded)
        elif not sharded.is_own:
            fetch = self._start_fetch(sharded, sharded.full)
            self._gather(sharded, sharded.full, fetch, exact=sharded.is_exact, async_op=False)

    def note_change(self, index: int) -> None:
        """A user changed values of the bucket, equally on all ranks."""
        self.second.forget(index)

    @contextmanager
    def unsharded_view(self, index: int) -> Iterator[Buffer]:
        """Return the whole bucket in exact values, to be read at once. Collective unless whole."""
        sharded = self._buckets[index]
        self._require_active(index)
        whole = self._common_or_none(sharded)
        if (whole is not None and sharded.is_exact) or sharded.is_own:
            yield sharded.own if whole is None else whole
            return
        self._make_room(sharded.bucket.numel)
        self._count_live(sharded.bucket.numel)
        full = self.pool.acquire(sharded.bucket.numel, sharded.own.dtype)
        try:
            self._gather(sharded, full, self._start_fetch(sharded, full), exact=True, async_op=False)
            yield full
        finally:
            self._count_live(-sharded.bucket.numel)
            self.pool.release(full)

    def free_idle(self) -> None:
        """Free every bucket without holds, prefetched ones too."""
        for sharded in self._buckets.values():
            if sharded.holds == 0 and sharded.full is not None:
                self._free(sharded)

    def suspend(self) -> None:
        """Free everything and gather nothing while `is_suspended`. Raises ShardingError if a bucket is held."""
        self.require_idle()
        self.free_idle()
        self.second.trim()
        self.is_suspended = True

    def trim(self) -> None:
        """Free every bucket without holds, and give the memory back."""
        self.free_idle()
        self.pool.trim()
        self.second.trim()

    def end_step(self) -> None:
        """The optimizer step is over: what was gathered is stale. Raises ShardingError if a bucket is still held."""
        self.require_idle()
        self.free_idle()
        self.second.forget_all()

    def require_idle(self) -> None:
        """Raise ShardingError if a bucket is held, or used by this rank."""
        held = [index for index, sharded in self._buckets.items() if sharded.holds or sharded.uses]
        if held:
            raise ShardingError(
                f"buckets {held} are gathered and in use",
                hint="leave GatheredParameters (and forward or backward passes) first",
                value=held,
            )

    def close(self) -> None:
        """Free everything, also what is held or used."""
        for sharded in self._buckets.values():
            sharded.holds = sharded.uses = 0
            if sharded.kept is not None:
                self._let_go(sharded, sharded.kept)
        self.free_idle()

    def _is_worth_keeping(self, index: int) -> bool:
        near = self.schedule.distance(index) <= self._policy.max_reuse_numel
        return near and self.live_numel + self._apart_numel <= self._policy.max_live_numel

    def _make_room(self, numel: int) -> None:
        """Free idle buckets, those needed last first, until `numel` more elements fit; what is held stays."""
        idle = [index for index, sharded in self._buckets.items() if sharded.holds == 0 and sharded.full is not None]
        idle.sort(key=self.schedule.distance)
        while idle and self.live_numel + self._apart_numel + numel > self._policy.max_live_numel:
            self._free(self._buckets[idle.pop()])

    def _prefetch(self) -> None:
        """Start fetches, then all-gathers, of the units that follow. See [Note: Shard read-ahead]."""
        begun = [self._buckets[index] for index in self.schedule.upcoming() if self._buckets[index].fetch is not None]
        for index in self.schedule.upcoming():
            sharded = self._buckets[index]
            if sharded.full is not None:
                continue
            numel = sharded.bucket.numel
            within = self._ahead_numel + numel <= self._policy.prefetch_numel
            if not within or self.live_numel + numel > self._policy.max_live_numel:
                break
            self._begin(sharded, exact=False)
            self._ahead_numel += numel
            sharded.is_ahead = True
            if not sharded.is_slow:
                self._launch(sharded)
        for sharded in begun:
            if sharded.fetch is not None and sharded.began_in < self._period:
                self._launch(sharded)

    def _require_active(self, index: int) -> None:
        if self.is_suspended:
            raise ShardingError("parameters are offloaded", hint="call engine.reload_states() first", value=index)

    def _count_live(self, numel: int) -> None:
        self.live_numel += numel
        self.peak_numel = max(self.peak_numel, self.live_numel + self.kept_numel)

    def _begin(self, sharded: ShardedBucket, *, exact: bool) -> None:
        """Give a bucket its memory, and start to fetch this rank's part of it."""
        groups = self._communicators.get_groups(sharded.bucket)
        sharded.is_exact = exact or sharded.is_own or groups.are_exact(sharded.bucket)
        if sharded.is_own:
            sharded.full, sharded.fetch = sharded.own, DoneFetch()
        else:
            sharded.full = self.pool.acquire(sharded.bucket.numel, sharded.own.dtype)
            sharded.slots.get_views(sharded.full)  # made here if at all: they are references too
            sharded.references = sharded.full.use_count()
            sharded.fetch = self._start_fetch(sharded, sharded.full)
        sharded.began_in = self._period
        self._count_live(sharded.bucket.numel)

    def _launch(self, sharded: ShardedBucket) -> None:
        """Gather a bucket that was begun. If that fails, it is as if it had not been."""
        assert sharded.fetch is not None  # the callers' condition
        assert sharded.full is not None
        try:
            sharded.work = self._gather(sharded, sharded.full, sharded.fetch, exact=sharded.is_exact, async_op=True)
        except BaseException:
            self._free(sharded)
            raise
        sharded.fetch = None

    def _start_fetch(self, sharded: ShardedBucket, full: Buffer) -> Fetch:
        """Start this rank's slice on its way into `full`, where `_gather` expects it."""
        if sharded.source is None:
            return DoneFetch()
        rank = self._communicators.get_groups(sharded.bucket).exact.rank
        return sharded.source.fetch(sharded.own, sharded.own_part(full, rank))

    def _gather(self, sharded: ShardedBucket, full: Buffer, fetch: Fetch, *, exact: bool, async_op: bool) -> Work:
        fetch.finish()
        if sharded.is_own:
            return DoneWork()
        work = self.second.gather(sharded.bucket, full, exact=exact, async_op=async_op)
        if work is not None:
            return work
        group = self._communicators.get_groups(sharded.bucket)
        communicator = group.exact if exact else group.of_passes(sharded.bucket)
        own = sharded.own if sharded.source is None else sharded.own_part(full, communicator.rank)
        counts, index = sharded.bucket.counts, sharded.bucket.index
        return communicator.all_gather(full, own, counts=counts, async_op=async_op, label="parameters", bucket=index)

    def _settle(self, sharded: ShardedBucket) -> None:
        """Finish the gather under way and let the frontend see the parameters; what this rank kept is released."""
        assert sharded.work is not None  # the callers' condition
        assert sharded.full is not None
        with self._waiting():
            sharded.work.wait()
        sharded.work = None
        groups = self._communicators.get_groups(sharded.bucket)
        if sharded.is_exact is groups.are_exact(sharded.bucket):  # as passes see it
            self.second.keep(sharded.plan, sharded.full, is_exact=sharded.is_exact)
        if sharded.kept is not None:
            self._let_go(sharded, sharded.kept)
        self._owner.show(sharded.bucket, sharded.slots.get_views(sharded.full))

    def _end_ahead(self, sharded: ShardedBucket) -> None:
        """Not when a rank finds the bucket there, which others may do later, but when the ranks hold or free it."""
        self._ahead_numel -= sharded.bucket.numel * sharded.is_ahead
        sharded.is_ahead = False

    def _free(self, sharded: ShardedBucket) -> None:
        """Release a bucket; what is under way is waited for."""
        assert sharded.full is not None  # the callers' condition
        self._end_ahead(sharded)
        if sharded.work is not None:
            self._settle(sharded)
        if sharded.fetch is not None:
            sharded.fetch.cancel()
            sharded.fetch = None
            self._give_back(sharded, sharded.full, sharded.references)
        elif sharded.uses:
            sharded.kept = RetainedBucket(sharded.full, sharded.references, sharded.is_exact)
            self.kept_numel += sharded.bucket.numel
        else:
            self._owner.hide(sharded.bucket)
            self._give_back(sharded, sharded.full, sharded.references)
        sharded.full = None
        self._count_live(-sharded.bucket.numel)

    def _let_go(self, sharded: ShardedBucket, kept: RetainedBucket) -> None:
        """This rank no longer uses what it kept."""
        self._owner.hide(sharded.bucket)
        sharded.kept = None
        self.kept_numel -= sharded.bucket.numel
        self._give_back(sharded, kept.full, kept.references)

    def _give_back(self, sharded: ShardedBucket, full: Buffer, references: int) -> None:
        """See [Note: Views after reshard]."""
        if not sharded.is_own:
            is_viewed = full.use_count() > references
            (self.pool.forget if is_viewed else self.pool.release)(full)
