"""The uses that a rank makes of sharded buckets, and how the other ranks come to gather them too.

[Note: Schedule of unshard events]
Ranks may take different ways through a model: layers that are dropped, experts that no token reached, images on some
ranks only. A gather needs all ranks all the same. So in each step the ranks follow a schedule
(`zero.plan.gather_schedule`), made of what they used in the steps before. Before
unsharding a bucket, a rank executes every earlier event of the schedule, also those that only other ranks need. Ranks
on the same way execute only what each of them needs.

At the end of an outermost forward pass and of a backward pass the ranks *meet*: each does what is left of the schedule
up to there, so that whatever follows (a loss that users average, parameters that they gather) finds all at one place. A
bucket that the rest of the schedule up to the meeting does not have, and which this rank does not happen to have, is
got by *voting*.

[Note: Unshard votes]
Each rank says what it waits for: a bucket, a reduction to be launched, or the end of the meeting. In each round all
ranks gather every bucket that some rank waits for, in rank order, and release it together; who waited keeps it. If no
rank waits for a bucket, the reduction that the lowest rank waits for is launched. If no rank waits for one either, the
meeting is over. A rank votes only when it has nothing of the schedule left to do before the meeting, so all of them
have gathered and freed the same. Where no schedule is known (the first step, evaluation, passes in another order than
before), all is got by voting.

The price is one vote a meeting, the size of two numbers, which waits for the slowest rank. Neither of a step can go:
a rank may need more in forward before others reduce gradients, and after backward before they agree on the norm.

[Note: Fixed order]
Under `GatherPolicy.is_fixed` ranks meet without a vote once a step went by its schedule on all of them. Each checks its
own uses: more than the schedule has is an error, and after less, of which all ranks know from the update, they vote.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from logging import INFO, WARNING, getLogger

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CommError, ShardingError
from polyaccel.zero.buckets.gathered_buckets import GatheredBuckets
from polyaccel.zero.buckets.grad_reducer import GradReducer
from polyaccel.zero.plan.gather_schedule import (
    EventKind,
    GatherSchedule,
    Record,
    SchedulePhase,
    SyncPoint,
    event,
    merge_schedules,
    unshards_of,
    without_early_releases,
)

log = getLogger(__name__)

_MOST_EVENTS = 1 << 20  # a longer step without an update is not learned


class GatherConsensus:
    """The exchange of what each rank waits for. See [Note: Unshard votes]."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: tuple[Buffer, Buffer] | None = None

    def exchange(self, wanted: int, apart_numel: int) -> tuple[list[int], int]:
        """What the ranks wait for, in rank order, and the most elements that any of them keeps for itself."""
        mine = array("q", (wanted, apart_numel))
        if self._communicator.world_size == 1:
            return [wanted], apart_numel
        if self._buffers is None:
            nbytes = len(mine) * mine.itemsize
            whole = self._communicator.allocate(nbytes * self._communicator.world_size, DType.UINT8)
            self._buffers = whole, whole.view(nbytes * self._communicator.rank, nbytes)
        whole, own = self._buffers
        own.from_bytes(mine.tobytes())
        self._communicator.all_gather(whole, own, label="what ranks need next")
        gathered = array("q")
        gathered.frombytes(whole.to_bytes())
        return list(gathered[::2]), max(gathered[1::2])


class OrderChangeLog:
    """Logs when this rank uses buckets in another order than in its last step."""

    def __init__(self, *, warn: bool) -> None:
        self._warn = warn
        self._learned: list[int] = []
        self._present: list[int] = []
        self._has_deviated = False
        self._is_changing = self._may_deviate = False

    def note(self, index: int) -> None:
        """Bucket `index` is used now."""
        position = len(self._present)
        self._present.append(index)
        is_as_learned = self._learned[position : position + 1] == [index]
        if not self._learned or self._has_deviated or self._may_deviate or is_as_learned:
            return
        self._has_deviated = True
        level = WARNING if self._warn else INFO
        log.log(level, "buckets are used in another order than in the last step; what is new is gathered on demand")

    def end_step(self) -> None:
        """The step is over: expect its order from now on."""
        if self._present:
            self._learned, self._present = self._present, []
        self._has_deviated &= not self._warn
        self._may_deviate, self._is_changing = self._is_changing, False

    def will_change(self) -> None:
        """A use was found out in this step, and will come earlier in the next one: not worth a log line."""
        self._is_changing = True


class Unsharder:
    """Unshards and reshards buckets for the code of this rank, whichever way it takes; all that hooks call.

    It owns the order of use ([Note: Schedule of unshard events]); `gathered` owns what is whole at present. `reducer`
    launches the reductions of released buckets, `host` joins the ranks for votes. With `warn`, every step in another
    order than the last one is logged, not only the first.
    """

    def __init__(
        self,
        gathered: GatheredBuckets,
        reducer: GradReducer,
        communicator: Communicator,
        *,
        is_active: bool,
        warn: bool,
        is_fixed: bool = False,
        host: Communicator | None = None,
    ) -> None:
        self.gathered = gathered
        self.learns = True
        """What is used now is part of a training step: the schedule of the next one has it."""
        self._reducer = reducer
        self._communicator = communicator
        self._is_active = is_active
        self._is_fixed = is_fixed
        self._is_settled = False  # the last step went by its schedule on all ranks
        self._votes = GatherConsensus(host or communicator)
        self._order = OrderChangeLog(warn=warn)
        self._record: list[Record] | None = []
        """What this rank did up to each meeting of the present step; None where that is too much to be kept."""
        self._events: list[int] = []
        """What it did since the last one."""
        self._count = 0
        self._held: dict[int, int] = {}
        """How often the ranks hold each bucket because the schedule says so."""
        self._until_end: list[int] = []
        """Buckets that stay unsharded until the backward pass ends."""
        self._released: set[int] = set()
        self._is_exact = False
        """What is voted for is gathered without quantisation."""
        self.is_voting = False
        """A vote is under way, or has failed: the other ranks may be inside of it."""

    @property
    def _schedule(self) -> GatherSchedule:
        return self.gathered.schedule

    # What frontends call.

    def unshard(self, index: int) -> None:
        """Make bucket `index` whole for this rank until a matching `reshard`, and wait for it."""
        learn = self.learns
        is_nested = self.gathered[index].uses > 0
        has_it = self.gathered.begin_use(index)
        try:
            if learn:
                if not is_nested:
                    self._order.note(index)
                has_it = self._follow(index, is_nested=is_nested) or has_it
            if not has_it:
                self._replay_rest()
                if not self.gathered.is_whole(index):
                    self._vote(event(EventKind.UNSHARD, index))
        except BaseException:
            self.gathered.end_use(index)  # a caller that failed to get it will not reshard it
            raise
        if learn:
            self._note(EventKind.UNSHARD, index)

    def reshard(self, index: int) -> None:
        """Undo one `unshard`."""
        if self.learns:
            self._note(EventKind.RESHARD, index)
        self.gathered.end_use(index)
        if self.learns:
            self._catch_up()

    def unshard_until_end(self, index: int) -> None:
        """Unshard a bucket until `reshard_rest`: until the backward pass ends."""
        self.unshard(index)
        self._until_end.append(index)

    def stays(self, index: int) -> bool:
        """Whether a bucket is unsharded until the backward pass ends."""
        return index in self._until_end

    def reshard_rest(self) -> None:
        """Undo every `unshard_until_end`."""
        while self._until_end:
            self.reshard(self._until_end.pop())

    def release(self, index: int) -> None:
        """No more gradients come for a bucket on this rank in this pass."""
        if not self._is_active or self._communicator.world_size == 1:
            self._reducer.launch(index)
            return
        self._note(EventKind.REDUCE, index)
        self._released.add(index)
        if self._schedule.is_known:
            self._catch_up()
        elif self._reducer.can_launch(index):
            self._vote(event(EventKind.REDUCE, index))

    def sync(self, end: SyncPoint) -> None:
        """This rank has come to an end that all ranks come to. Returns when all have."""
        if not self._is_active:
            return
        self._replay_rest()
        self._vote(-1 - end)
        if not self.learns:
            return
        if self._record is not None:
            self._record.append((end, without_early_releases(self._events)))
            self._count += len(self._events) + 1
            if self._count > _MOST_EVENTS:
                self._record = None
        self.abandon()
        self._schedule.end_segment(end)

    def gather_exactly(self, *, exact: bool) -> None:
        """From now on gather `exact` values for votes, or those of passes; what is idle has the others. Collective."""
        self._is_exact = exact
        self.gathered.free_idle()

    def abandon(self) -> None:
        """What was used since the last meeting says nothing about later steps: it failed."""
        self._events.clear()
        self._released.clear()

    def are_unsharded(self, indices: Iterable[int]) -> bool:
        """Whether the ranks have gathered all these buckets for their users, whatever any of them uses."""
        return all(self.gathered[index].holds > self._held.get(index, 0) for index in indices)

    def will_change_order(self) -> None:
        """The next step uses buckets in another order than this one, and rightly so."""
        self._order.will_change()

    @property
    def has_deviated(self) -> bool:
        """Whether this rank did anything else in this step than its schedule says."""
        schedule = self._schedule.segments
        if self._record is None or len(self._record) > len(schedule):
            return True
        return any(
            (segment.end, segment.events) != record for segment, record in zip(schedule, self._record, strict=False)
        )

    def require_idle(self) -> None:
        """Raise ShardingError while a bucket is in use; drop what the schedule holds."""
        for index, count in self._held.items():
            for _ in range(count):
                self.gathered.reshard(index, keep=False)
        self._held.clear()
        self.gathered.require_idle()

    def end_step(self, *, learn: bool) -> None:
        """End the optimizer step; `learn` makes a schedule, collectively."""
        segments = self._learned() if learn else self._schedule.segments
        self._is_settled = not learn
        self.require_idle()
        self.gathered.end_step()
        self._schedule.begin_step(segments)
        self._order.end_step()
        self._record, self._count = [], 0
        self.abandon()

    def _learned(self) -> tuple[SchedulePhase, ...]:
        mine = self._record
        if self._communicator.world_size == 1:
            return () if mine is None else merge_schedules(self._schedule.segments, [mine])
        records = [_unpacked(packed) for packed in self._communicator.all_gather_object(_packed(mine))]
        known = [record for record in records if record is not None]
        return merge_schedules(self._schedule.segments, known) if len(known) == len(records) else ()

    # The schedule.

    def _note(self, kind: EventKind, index: int) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event(kind, index))

    def _follow(self, index: int, *, is_nested: bool) -> bool:
        """Execute scheduled events up to the next hold; False if there is none before the next meeting."""
        count = self._schedule.find(event(EventKind.UNSHARD, index))
        if count < 0 or (is_nested and unshards_of(self._schedule.ahead(count))):
            return False
        for _ in range(count + 1):
            self._do_next()
        return True

    def _catch_up(self) -> None:
        """Do what comes next in the schedule as long as it is the end of something with which this rank is done."""
        while (following := self._schedule.peek()) is not None:
            index, kind = divmod(following, 3)
            is_due = index in self._released if kind == EventKind.REDUCE else kind == EventKind.RESHARD
            if kind == EventKind.RESHARD and self.gathered[index].uses >= self._held.get(index, 0) > 0:
                is_due = False
            if not is_due:
                return
            self._do_next()

    def _replay_rest(self) -> None:
        """Do what the schedule has up to the next meeting."""
        while self.learns and self._schedule.peek() is not None:
            self._do_next()

    def _do_next(self) -> None:
        index, kind = divmod(self._schedule.step(), 3)
        if kind == EventKind.UNSHARD:
            self.gathered.unshard(index, ahead=True)
            self._held[index] = self._held.get(index, 0) + 1
        elif kind == EventKind.REDUCE:
            self._reducer.launch(index)
        elif self._held.get(index):
            self._held[index] -= 1
            self.gathered.reshard(index)

    # Votes.

    def _vote(self, wanted: int) -> None:
        """Vote until `wanted`, an event or -1 - an end, has come about. See [Note: Unshard votes]."""
        if self._is_fixed and self._is_settled and self.learns:
            self._require_scheduled(wanted)
            return
        self.is_voting = True
        while True:
            votes, apart_numel = self._votes.exchange(wanted, self.gathered.kept_numel)
            buckets = dict.fromkeys(vote // 3 for vote in votes if vote >= 0 and vote % 3 == EventKind.UNSHARD)
            self.gathered.lend_once(buckets, apart_numel, exact=self._is_exact)
            done = {event(EventKind.UNSHARD, index) for index in buckets}
            releases = [vote for vote in votes if vote >= 0 and vote % 3 == EventKind.REDUCE]
            if not buckets and releases:
                self._reducer.launch(releases[0] // 3)
                done = {releases[0]}
            elif not buckets:
                done = set(votes)
                self._require_one_end(votes)
            if wanted in done:
                self.is_voting = False
                return

    def _require_scheduled(self, wanted: int) -> None:
        """Raise ShardingError unless `wanted` is the end that comes next. See [Note: Fixed order]."""
        if wanted == -1 - self._schedule.end:
            return
        what = f"bucket {wanted // 3}" if wanted >= 0 else f"the end of {SyncPoint(-1 - wanted)}"
        hint = 'set "stage3_fixed_order": false: the model does not do the same in every step'
        raise ShardingError(f"{what} comes in another order than in the steps before", hint=hint, value=wanted)

    def _require_one_end(self, votes: list[int]) -> None:
        """Raise CommError, on all ranks, if they do not meet at the end of the same."""
        if len(set(votes)) == 1:
            return
        ranks: dict[int, list[int]] = {}
        for rank, vote in zip(self._communicator.ranks, votes, strict=True):
            ranks.setdefault(vote, []).append(rank)
        ends = "; ".join(f"ranks {them} have come to the end of {SyncPoint(-1 - vote)}" for vote, them in ranks.items())
        raise CommError(
            f"the ranks run different passes: {ends}",
            hint="let every rank call the engine, and backward, equally often and in the same order; a rank whose data "
            "has ended can run its last batch once more, with its loss multiplied by 0",
            value=votes,
        )


def _packed(record: list[Record] | None) -> bytes | None:
    """Each segment as its end, its number of events, and the events."""
    if record is None:
        return None
    return array("q", [value for end, events in record for value in (end, len(events), *events)]).tobytes()


def _unpacked(packed: bytes | None) -> list[Record] | None:
    if packed is None:
        return None
    values = array("q")
    values.frombytes(packed)
    record: list[Record] = []
    at = 0
    while at < len(values):
        end, count = values[at : at + 2]
        record.append((end, tuple(values[at + 2 : at + 2 + count])))
        at += 2 + count
    return record
