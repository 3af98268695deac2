"""Courses as integers: what merging the ranks' records keeps, and where a step stands in one."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.zero.plan.gather_schedule import (
    MOST_AGE,
    EventKind,
    GatherSchedule,
    SchedulePhase,
    SyncPoint,
    event,
    merge_schedules,
    unshards_of,
    without_early_releases,
)

KINDS = {"+": EventKind.UNSHARD, "-": EventKind.RESHARD, "=": EventKind.REDUCE}


def events(text: str) -> tuple[int, ...]:
    """`+1 -1 =1`: bucket 1 is held, dropped and released."""
    return tuple(event(KINDS[word[0]], int(word[1:])) for word in text.split())


def shown(found: tuple[int, ...]) -> str:
    signs = {kind: sign for sign, kind in KINDS.items()}
    return " ".join(f"{signs[EventKind(each % 3)]}{each // 3}" for each in found)


def merged(
    *texts: str, last: tuple[SchedulePhase, ...] = (), end: SyncPoint = SyncPoint.BACKWARD
) -> tuple[SchedulePhase, ...]:
    return merge_schedules(last, [[(end, events(text))] for text in texts])


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    remaining = iter(whole)
    return all(one in remaining for one in part)


def test_where_all_ranks_did_the_same_that_is_the_course():
    record = "+0 +1 -1 =1 +2 +2 -2 -2 =2 -0 =0"
    (segment,) = merged(record, record)
    assert shown(segment.events) == record


def test_what_some_rank_skipped_is_in_the_course():
    (segment,) = merged("+1 -1 =1 +3 -3 =3", "+2 -2 =2 +3 -3 =3")
    assert shown(segment.events) == "+1 -1 =1 +2 -2 =2 +3 -3 =3"


def test_a_release_comes_where_the_last_rank_reports_it_and_a_drop_where_the_last_is_done():
    (segment,) = merged("+1 -1 =1 +2 -2 =2", "+1 +2 -2 =2 -1 =1")
    assert shown(segment.events) == "+1 +2 -2 -1 =1 =2"
    assert shown(without_early_releases(events("+1 =1 -1 +2 =1 =2"))) == "+1 -1 +2 =1 =2"


def test_other_orders_hold_twice():
    (segment,) = merged("+1 -1 +2 -2", "+2 -2 +1 -1")
    assert sorted(unshards_of(segment.events)) in ([1, 1, 2], [1, 2, 2])


def test_what_is_held_on_is_not_dropped_and_dropped_where_it_was():
    first, second = merge_schedules(
        (),
        [
            [(SyncPoint.FORWARD, events("+1 +2 -2")), (SyncPoint.BACKWARD, events("+2 -2 -1"))],
            [(SyncPoint.FORWARD, events("+1 +3 -3")), (SyncPoint.BACKWARD, events("+3 -3 -1"))],
        ],
    )
    assert shown(first.events) == "+1 +2 -2 +3 -3"
    assert shown(second.events) == "+2 -2 +3 -3 -1"


def test_what_nobody_used_is_forgotten_after_a_while():
    course = merged("+1 -1 +2 -2", "+1 -1")
    for _ in range(MOST_AGE):
        course = merged("+1 -1", "+1 -1", last=course)
        assert shown(course[0].events) == "+1 -1 +2 -2"
    course = merged("+1 -1", "+1 -1", last=course)
    assert shown(course[0].events) == "+1 -1"


def test_what_was_needed_long_ago_is_no_more_than_what_is_needed_now():
    """Else gathering in passing would cost more than asking."""
    course = merged("+1 -1")
    for bucket in range(2, 9):
        course = merged(f"+{bucket} -{bucket}", last=course)
        assert unshards_of(course[0].events)[-1] == bucket
        assert len(unshards_of(course[0].events)) <= 2


def test_other_numbers_of_segments_make_no_course_and_other_passes_a_new_one():
    one = [(SyncPoint.FORWARD, events("+1 -1"))]
    two = [*one, (SyncPoint.BACKWARD, events("+1 -1"))]
    assert merge_schedules((), [one, two]) == ()
    course = merge_schedules((), [two, two])
    assert merge_schedules(course, [one, one]) == course  # a step with fewer passes
    other = [(SyncPoint.BACKWARD, events("+2 -2"))]
    assert merge_schedules(course, [other, other]) == merge_schedules((), [other, other])


@st.composite
def records(draw):
    """What a rank may do in a segment: holds that nest or not, drops of earlier ones, releases."""
    found: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        found.append(event(draw(st.sampled_from(EventKind)), draw(st.integers(0, 4))))
    return without_early_releases(found)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(records(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_whatever_ranks_do(steps):
    course: tuple[SchedulePhase, ...] = ()
    for step in steps:
        told = [[(SyncPoint.BACKWARD, record)] for record in step]
        course, last = merge_schedules(course, told), course
        assert course == merge_schedules(last, told)
        (segment,) = course
        holds = unshards_of(segment.events)
        assert len(segment.ages) == len(holds)
        for record in step:
            assert is_subsequence(unshards_of(record), holds)
            released = [each for each in record if each % 3 == EventKind.REDUCE]
            assert set(released) <= set(segment.events)
        assert without_early_releases(segment.events) == segment.events
        same = [[(SyncPoint.BACKWARD, segment.events)]] * 2
        assert merge_schedules((), same)[0].events == segment.events
        assert merge_schedules(course, same)[0].events == segment.events


def test_a_step_knows_what_comes_next_and_how_far_it_is():
    course = GatherSchedule({1: 10, 2: 20, 3: 30})
    assert not course.is_known
    assert course.distance(1) == inf
    course.begin_step(
        merge_schedules(
            (), [[(SyncPoint.FORWARD, events("+1 +1 -1 -1 +2 -2")), (SyncPoint.BACKWARD, events("+3 -3 +1 -1"))]]
        )
    )
    assert list(course.upcoming()) == [1, 2, 3, 1]
    assert (course.distance(2), course.distance(3), course.find(event(EventKind.UNSHARD, 3))) == (10, 30, -1)
    for _ in range(course.find(event(EventKind.UNSHARD, 2)) + 1):
        course.step()
    assert (list(course.upcoming()), course.distance(1)) == ([3, 1], 30)
    course.end_segment(SyncPoint.FORWARD)
    assert shown((course.peek(),)) == "+3"
    course.end_segment(SyncPoint.EVALUATION)
    assert not course.is_known
    assert list(course.upcoming()) == []
