"""Schedule of unshard, reshard and reduce events that all ranks execute in the same order during a step.

Each rank records what it used itself. A schedule is made of the records of all ranks and of the last schedule, by a
pure function of integers, so that every rank makes the same one.

[Note: Schedule merge]
Holds are merged into a sequence in which every rank finds its own ones in order: what is not there is inserted. A hold
that no rank has used in the last `MOST_AGE` exchanges is left out, and so are older ones where there would be more than
twice as many holds as ranks needed now. A drop comes where the last rank that had the hold is done with it, and a
release where the last rank reported it, since gradients that come after it travel once more. Where all ranks have the
same record and the schedule has the same holds, the record is the schedule, event by event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntEnum
from math import inf

MOST_AGE = 16


class EventKind(IntEnum):
    """What happens to a bucket. An event is `3 * bucket + kind`."""

    UNSHARD = 0
    RESHARD = 1
    REDUCE = 2
    """No more gradients come for it in this pass: its reduction may be launched."""


class SyncPoint(IntEnum):
    """What the ranks have come to the end of when they meet."""

    FORWARD = 0
    BACKWARD = 1
    EVALUATION = 2
    PROGRAM = 3
    """A forward and a backward pass in one, as JAX runs them."""

    def __str__(self) -> str:
        return ("a forward pass", "a backward pass", "an evaluation", "a program with gradients")[self]


Record = tuple[int, tuple[int, ...]]
"""What one rank did between two meetings: the `SyncPoint`, and the events before it."""


def event(kind: EventKind, bucket: int) -> int:
    return 3 * bucket + kind


def unshards_of(events: Iterable[int]) -> list[int]:
    """The buckets that are held, in order."""
    return [code // 3 for code in events if code % 3 == EventKind.UNSHARD]


def without_early_releases(events: Sequence[int]) -> tuple[int, ...]:
    """`events` with the last release of each bucket alone."""
    last = {code: position for position, code in enumerate(events)}
    return tuple(code for position, code in enumerate(events) if code % 3 != EventKind.REDUCE or last[code] == position)


@dataclass(frozen=True, slots=True)
class SchedulePhase:
    """A part of a schedule, from one meeting to the next. `ages` says of each hold how many exchanges ago a rank last
    used it."""

    end: int
    events: tuple[int, ...]
    ages: tuple[int, ...]


def merge_schedules(last: Sequence[SchedulePhase], records: Sequence[Sequence[Record]]) -> tuple[SchedulePhase, ...]:
    """The schedule of the next step, after one in which rank r did `records[r]`; see [Note: Schedule merge].

    There is none, and it is empty, if ranks met differently often. Where passes came in another order than in the last
    schedule, that is forgotten.
    """
    ends = [[end for end, _ in record] for record in records]
    if any(each != ends[0] for each in ends):
        return ()
    if any(old.end != new for old, new in zip(last, ends[0], strict=False)):
        last = ()
    merged = [
        _merge_segment(
            last[at] if at < len(last) else SchedulePhase(end, (), ()), [record[at][1] for record in records]
        )
        for at, end in enumerate(ends[0])
    ]
    return (*merged, *last[len(merged) :])


@dataclass(eq=False, slots=True)
class _Use:
    """A hold of the schedule that is being made."""

    bucket: int
    age: int


def _merge_segment(last: SchedulePhase, records: Sequence[tuple[int, ...]]) -> SchedulePhase:
    distinct = list(dict.fromkeys(records))
    sought = [unshards_of(record) for record in distinct]
    old = unshards_of(last.events)
    if len(distinct) == 1 and (not old or old == sought[0]):
        return SchedulePhase(last.end, distinct[0], (0,) * len(sought[0]))
    known = [_Use(bucket, age + 1) for bucket, age in zip(old, last.ages, strict=True)]
    uses = list(known)
    for holds in sought:
        uses = _supersequence(uses, holds)
    positions = _EventPositions(uses)
    positions.read(last.events, known, is_old=True)
    for record, holds in zip(distinct, sought, strict=True):
        found = _matched(uses, holds)
        for use in found:
            use.age = 0
        positions.read(record, found, is_old=False)
    needed = sum(use.age == 0 for use in uses)
    limit = MOST_AGE
    while sum(use.age <= limit for use in uses) > 2 * needed:
        limit -= 1
    kept = {use for use in uses if use.age <= limit}
    return SchedulePhase(last.end, tuple(positions.events(kept)), tuple(use.age for use in uses if use in kept))


class _EventPositions:
    """Positions of drops and releases among `uses`: each after so many of them."""

    def __init__(self, uses: Sequence[_Use]) -> None:
        self._uses = uses
        self._after = {use: position for position, use in enumerate(uses, 1)}
        self._drops: dict[_Use, float] = {}
        self._old_drops: dict[_Use, float] = {}
        self._strays: dict[tuple[int, int], int] = {}
        """Drops of what was held before the segment began: bucket and count, and the position."""
        self._releases: dict[int, int] = {}
        self._old_releases: dict[int, int] = {}

    def read(self, events: Sequence[int], found: Sequence[_Use], *, is_old: bool) -> None:
        """Look at the drops and releases of `events`, whose holds are `found`. Those of the last schedule count where
        no record knows better."""
        drops, releases = (self._old_drops, self._old_releases) if is_old else (self._drops, self._releases)
        remaining, position = iter(found), 0
        is_open: dict[int, list[_Use]] = {}
        strays: dict[int, int] = {}
        for code in events:
            bucket, kind = divmod(code, 3)
            if kind == EventKind.UNSHARD:
                use = next(remaining)
                position = self._after[use]
                is_open.setdefault(bucket, []).append(use)
            elif kind == EventKind.REDUCE:
                releases[bucket] = max(position, releases.get(bucket, 0))
            elif is_open.get(bucket):
                use = is_open[bucket].pop()
                drops[use] = max(position, drops.get(use, 0))
            elif not is_old:
                strays[bucket] = strays.get(bucket, 0) + 1
                key = bucket, strays[bucket]
                self._strays[key] = max(position, self._strays.get(key, 0))
        for rest in is_open.values():
            drops |= dict.fromkeys(rest, inf)

    def events(self, kept: set[_Use]) -> Iterator[int]:
        """The events of a schedule that has the uses `kept`."""
        buckets = {use.bucket for use in kept}
        after: dict[float, list[int]] = {}
        for use in reversed(self._uses):
            if use in kept:
                position = self._drops.get(use, self._old_drops.get(use, inf))
                after.setdefault(position, []).append(event(EventKind.RESHARD, use.bucket))
        for (bucket, _), position in sorted(self._strays.items()):
            after.setdefault(position, []).append(event(EventKind.RESHARD, bucket))
        old = {bucket: position for bucket, position in self._old_releases.items() if bucket in buckets}
        for bucket, position in sorted((old | self._releases).items()):
            after.setdefault(position, []).append(event(EventKind.REDUCE, bucket))
        yield from after.get(0, ())
        for position, use in enumerate(self._uses, 1):
            if use in kept:
                yield event(EventKind.UNSHARD, use.bucket)
            yield from after.get(position, ())


def _supersequence(uses: list[_Use], holds: Sequence[int]) -> list[_Use]:
    """`uses`, and new ones where `holds` is not found among them in order."""
    if len(_matched(uses, holds)) == len(holds):
        return uses
    matcher = SequenceMatcher(None, [use.bucket for use in uses], holds, autojunk=False)
    merged: list[_Use] = []
    for kind, low, high, new_low, new_high in matcher.get_opcodes():
        merged += uses[low:high]
        if kind in ("insert", "replace"):
            merged += [_Use(bucket, 0) for bucket in holds[new_low:new_high]]
    return merged


def _matched(uses: Iterable[_Use], holds: Sequence[int]) -> list[_Use]:
    """The first uses that `holds` are found at in order, as far as they are."""
    found: list[_Use] = []
    for use in uses:
        if len(found) < len(holds) and use.bucket == holds[len(found)]:
            found.append(use)
    return found


class GatherSchedule:
    """The schedule that the present step follows, and where it stands. `numels` are the buckets' lengths.

    What comes next decides what to gather ahead, and how many elements will be held before a bucket is needed again.
    """

    def __init__(self, numels: Mapping[int, int]) -> None:
        self._numels = numels
        self.segments: tuple[SchedulePhase, ...] = ()
        self._events: list[int] = []
        self._uses: list[tuple[int, int]] = []
        """(position in `_events`, bucket) of each hold of a bucket that was not held."""
        self._next_use = 0
        self._at = 0
        self._segment = 0
        self._low = self._high = 0
        self._is_left = False

    @property
    def is_known(self) -> bool:
        """Whether it says what the ranks do until they meet next."""
        return not self._is_left and self._segment < len(self.segments)

    @property
    def end(self) -> int:
        """The `SyncPoint` at which the ranks meet next; -1 where that is not known."""
        return self.segments[self._segment].end if self.is_known else -1

    def begin_step(self, segments: Sequence[SchedulePhase]) -> None:
        """A step begins, and follows `segments`."""
        if segments is not self.segments:
            self.segments = tuple(segments)
            self._events = [event for segment in segments for event in segment.events]
            self._uses = list(_first_holds(self._events))
        self._segment = self._next_use = self._at = self._low = 0
        self._high = len(self.segments[0].events) if self.segments else 0
        self._is_left = False

    def end_segment(self, end: int) -> None:
        """The ranks meet. Should they have come to another end than was expected, nothing is known of what follows."""
        if self._segment < len(self.segments):
            self._is_left |= self.segments[self._segment].end != end
        self._move(self._high)
        self._segment += 1
        self._low = self._high
        if self._segment < len(self.segments):
            self._high += len(self.segments[self._segment].events)

    def peek(self) -> int | None:
        """The next event before the ranks meet."""
        return self._events[self._at] if self.is_known and self._at < self._high else None

    def find(self, sought: int) -> int:
        """How many events come before `sought` does, in what is left before the ranks meet; -1 if it does not."""
        if not self.is_known:
            return -1
        try:
            return self._events.index(sought, self._at, self._high) - self._at
        except ValueError:
            return -1

    def ahead(self, count: int) -> Sequence[int]:
        """The next `count` events."""
        return self._events[self._at : self._at + count]

    def step(self) -> int:
        """Pass the next event."""
        passed = self._events[self._at]
        self._move(self._at + 1)
        return passed

    def _move(self, at: int) -> None:
        self._at = at
        while self._next_use < len(self._uses) and self._uses[self._next_use][0] < at:
            self._next_use += 1

    def upcoming(self) -> Iterator[int]:
        """The buckets that are needed next, nearest first."""
        if not self._is_left:
            for at in range(self._next_use, len(self._uses)):
                yield self._uses[at][1]

    def distance(self, bucket: int) -> float:
        """Elements that will be used before `bucket` is; infinite if it is not expected again."""
        passed = 0
        for upcoming in self.upcoming():
            if upcoming == bucket:
                return passed
            passed += self._numels[upcoming]
        return inf


def _first_holds(events: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(position, bucket) of the holds of buckets that were not held."""
    held: dict[int, int] = {}
    for position, code in enumerate(events):
        bucket, kind = divmod(code, 3)
        if kind == EventKind.UNSHARD:
            if not held.get(bucket):
                yield position, bucket
            held[bucket] = held.get(bucket, 0) + 1
        elif kind == EventKind.RESHARD and held.get(bucket):
            held[bucket] -= 1
