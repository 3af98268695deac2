"""Which tags go after a save: never the last good one, nor what `latest` names, nor what is busy or unknown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.checkpoint.retention import KEEP_ALL, KeepBest, Retention, SavedTag, TagState

ages = st.integers(0, 6).map(float)
numbers = st.integers(-4, 4).map(float)
counts = st.integers(1, 4)
rules = st.builds(
    Retention,
    keep_last=st.none() | counts,
    keep_every=st.none() | st.integers(1, 5),
    keep_best=st.none() | st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), counts),
)


@st.composite
def folders(draw: st.DrawFn) -> list[SavedTag]:
    """Tags of few ages, steps and metrics, so that many are equal."""
    return [
        SavedTag(
            f"t{index}",
            draw(ages),
            step=draw(st.none() | st.integers(0, 12)),
            metric=draw(st.none() | numbers),
            state=draw(st.sampled_from([*TagState, TagState.GOOD, TagState.GOOD])),
            is_busy=draw(st.integers(0, 4)) == 0,
        )
        for index in range(draw(st.integers(0, 10)))
    ]


latests = st.none() | st.integers(0, 10).map(lambda index: f"t{index}")


def newest_first(tags: list[SavedTag]) -> list[SavedTag]:
    good = [each for each in tags if each.state is TagState.GOOD]
    return sorted(good, key=lambda each: (each.saved_at_s, each.tag), reverse=True)


@given(rule=rules, tags=folders(), latest=latests)
def test_what_must_stay_stays(rule: Retention, tags: list[SavedTag], latest: str | None) -> None:
    gone = set(rule.deletable(tags, latest))
    good = newest_first(tags)
    assert latest not in gone
    assert not gone & {each.tag for each in tags if each.is_busy or each.state is TagState.UNREADABLE}
    if good:
        assert good[0].tag not in gone
    else:
        assert not gone
    newer_than_good = {each.tag for each in tags if good and each.saved_at_s > good[0].saved_at_s}
    assert not gone & newer_than_good


@given(rule=rules, tags=folders(), latest=latests)
def test_what_the_rule_keeps_stays_and_the_rest_goes(rule: Retention, tags: list[SavedTag], latest: str | None) -> None:
    gone = set(rule.deletable(tags, latest))
    good = newest_first(tags)
    wanted = {each.tag for each in good[: rule.keep_last or 0]}
    if rule.keep_every:
        wanted |= {each.tag for each in good if each.step is not None and each.step % rule.keep_every == 0}
    measured = [each for each in good if each.metric is not None]
    worst_kept = None
    if rule.keep_best:
        signed = [
            each.metric * (1 if rule.keep_best.mode == "min" else -1) for each in measured if each.metric is not None
        ]
        worst_kept = max(sorted(signed)[: rule.keep_best.count], default=math.inf)
        wanted |= {each.tag for each, value in zip(measured, signed, strict=True) if value < worst_kept}
        stays = {each.tag for each in measured} - gone
        assert len(stays) >= min(rule.keep_best.count, len(measured))
    assert not gone & wanted
    # Nothing stays that no reason keeps. Of equal metrics, which one is best is the implementation's choice.
    if rule == KEEP_ALL or (rule.keep_best and not measured):
        assert not gone
    elif rule.keep_best is None:
        reasons = {latest, *wanted, *(each.tag for each in good[:1])}
        free = {each.tag for each in good if not each.is_busy}
        assert gone & {each.tag for each in good} == free - reasons


@given(rule=rules, tags=folders(), latest=latests)
def test_a_second_look_deletes_nothing_more(rule: Retention, tags: list[SavedTag], latest: str | None) -> None:
    gone = rule.deletable(tags, latest)
    assert len(gone) == len(set(gone))
    assert rule.deletable([each for each in tags if each.tag not in gone], latest) == ()


def test_oldest_first() -> None:
    tags = [SavedTag(f"t{age}", float(age)) for age in (3, 1, 2, 5, 4)]
    assert Retention(keep_last=2).deletable(tags, "t5") == ("t1", "t2", "t3")


def test_what_is_not_finite_takes_no_place_and_goes_once_a_good_one_is_newer() -> None:
    sick = SavedTag("sick", 2.0, state=TagState.NOT_FINITE)
    tags = [SavedTag("a", 0.0), SavedTag("b", 1.0), sick]
    assert Retention(keep_last=2).deletable(tags, "b") == ()
    assert Retention(keep_last=2).deletable([*tags, SavedTag("c", 3.0)], "c") == ("a", "sick")


@pytest.mark.parametrize(
    ("state", "number"),
    [
        ({"eval": {"loss": 1.5}}, 1.5),
        ({"eval": {"loss": 2}}, 2.0),
        ({"eval": {"loss": True}}, None),
        ({"eval": {"loss": math.nan}}, None),
        ({"eval": {"loss": "1.5"}}, None),
        ({"eval": 1.5}, None),
        ({"eval.loss": 1.5}, None),
        (None, None),
    ],
    ids=["float", "int", "bool", "nan", "text", "no-table", "no-dots", "nothing"],
)
def test_a_metric_is_a_finite_number_at_its_dotted_name(state: object, number: float | None) -> None:
    assert KeepBest("eval.loss").number_in(state) == number
