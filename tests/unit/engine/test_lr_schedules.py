"""Schedules give the values of their formulas, at the step at which DeepSpeed gives them, and refuse nonsense."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, log, pi
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.engine.lr_schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
)
from polyaccel.errors import CheckpointError, ConfigError


@dataclass
class Groups:
    """An optimizer as a schedule sees it."""

    param_groups: list[dict[str, Any]] = field(default_factory=lambda: [{"lr": 0.5, "betas": (0.9, 0.999)}])


def rates_used(schedule: Schedule, steps: int) -> list[float]:
    """The first group's learning rate at each of the first `steps` optimizer steps."""
    used = []
    for _ in range(steps):
        used.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return used


iterations = st.integers(-1, 400)
durations = st.integers(1, 120)
kinds = st.sampled_from(["log", "linear"])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0.1, 0.1, 0.125, 0.15, 0.175, 0.2, 0.2]),
        ("log", [0.1, 0.1, 0.1 + 0.1 * log(2) / log(4), 0.1 + 0.1 * log(3) / log(4), 0.2, 0.2, 0.2]),
    ],
)
def test_warmup_uses_its_lowest_rate_in_the_first_two_steps(kind: Any, expected: list[float]) -> None:
    schedule = WarmupLR(Groups(), warmup_min_lr=0.1, warmup_max_lr=0.2, warmup_num_steps=4, warmup_type=kind)
    assert rates_used(schedule, 7) == pytest.approx(expected, rel=1e-12)


def test_warmup_without_a_maximum_rises_to_each_groups_own_rate() -> None:
    groups = Groups([{"lr": 0.5}, {"lr": 0.25}])
    schedule = WarmupLR(groups, warmup_num_steps=10)
    assert [group["lr"] for group in groups.param_groups] == [0.0, 0.0]
    schedule.step(10)
    assert schedule.get_lr() == schedule.get_last_lr() == [0.5, 0.25]


def test_warmup_of_one_step_counts_as_two() -> None:
    assert WarmupLR(Groups(), warmup_num_steps=1).lrs_at(1) == WarmupLR(Groups(), warmup_num_steps=2).lrs_at(1) == [0.5]
    linear = WarmupLR(Groups(), warmup_num_steps=1, warmup_type="linear")
    assert [linear.lrs_at(i) for i in (0, 1, 2)] == [[0.0], [0.25], [0.5]]


def test_warmup_decay_falls_to_its_minimum_at_the_end() -> None:
    schedule = WarmupDecayLR(
        Groups(), total_num_steps=6, warmup_min_lr=0.1, warmup_max_lr=0.2, warmup_num_steps=2, warmup_type="linear"
    )
    expected = [0.1, 0.1, 0.15, 0.2, 0.175, 0.15, 0.125, 0.1, 0.1]
    assert rates_used(schedule, 9) == pytest.approx(expected, rel=1e-12)


def test_warmup_cosine_is_a_ratio_of_each_groups_rate() -> None:
    groups = Groups([{"lr": 0.5}, {"lr": 4.0}])
    schedule = WarmupCosineLR(
        groups, total_num_steps=7, warmup_min_ratio=0.2, warmup_num_steps=3, cos_min_ratio=0.1, warmup_type="linear"
    )
    ramp = [0.2, 0.2, 0.2 + 0.8 / 3, 0.2 + 1.6 / 3]
    down = [0.1 + 0.9 * (1 + cos(pi * n / 4)) / 2 for n in (1, 2, 3, 4)]
    assert rates_used(schedule, 10) == pytest.approx([0.5 * ratio for ratio in [*ramp, *down, 0.1, 0.1]], rel=1e-12)
    assert groups.param_groups[1]["lr"] == pytest.approx(0.4, rel=1e-12)


def test_one_cycle_moves_rate_and_momentum_against_each_other() -> None:
    groups = Groups()
    schedule = OneCycle(
        groups, cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4, cycle_second_step_size=2,
        decay_lr_rate=1.0, decay_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.01,
    )  # fmt: skip
    rates, momenta = [], []
    for _ in range(9):
        rates.append(groups.param_groups[0]["lr"])
        momenta.append(groups.param_groups[0]["betas"][0])
        schedule.step()
    decayed = [0.1 / 1.5, 0.1 / 2]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, *decayed], rel=1e-12)
    assert momenta == pytest.approx([0.9, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.005, 0.9 * 1.01], rel=1e-12)
    assert groups.param_groups[0]["betas"][1] == 0.999


def test_one_cycle_holds_its_values_in_stairs() -> None:
    schedule = OneCycle(
        Groups(), cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=6, cycle_second_step_size=4,
        cycle_first_stair_count=3, cycle_second_stair_count=2,
    )  # fmt: skip
    third = 1 / 3
    expected = [0, 0, third, third, 2 * third, 2 * third, 1, 0.5, 0.5, 0, 0, 0]
    assert rates_used(schedule, 12) == pytest.approx(expected, rel=1e-12)


@given(first=st.integers(1, 50), second=st.integers(1, 50), stairs=st.integers(1, 60))
def test_stairs_reach_the_top_of_a_cycle_exactly(first: int, second: int, stairs: int) -> None:
    schedule = OneCycle(
        Groups(), 0.0, 1.0, cycle_first_step_size=first, cycle_second_step_size=second, cycle_first_stair_count=stairs
    )
    assert schedule.lrs_at(first - 1) == [1.0]


def test_one_cycle_cycles_the_momentum_that_a_group_has(caplog: pytest.LogCaptureFixture) -> None:
    groups = Groups([{"lr": 1.0, "momentum": 0.5}, {"lr": 1.0, "momentum": 0.0}, {"lr": 1.0}])
    OneCycle(groups, 0.1, 0.2)
    assert groups.param_groups == [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.0}, {"lr": 0.1}]
    assert not caplog.records

    OneCycle(Groups([{"lr": 1.0, "momentum": 0.0}]), 0.1, 0.2)
    assert "cycle_momentum has no effect" in caplog.text


def test_a_momentum_that_grows_to_one_is_refused() -> None:
    schedule = OneCycle(Groups(), 0.1, 0.2, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.1)
    schedule.step(2)
    with pytest.raises(ConfigError) as caught:
        schedule.step(3)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("scheduler.params.decay_mom_rate", 0.1)
    ]
    assert "1.08" in str(caught.value)


@pytest.mark.parametrize(
    ("staircase", "expected"), [(False, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]), (True, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0])]
)
def test_range_test_grows_from_the_first_step_on(staircase: bool, expected: list[float]) -> None:
    schedule = LRRangeTest(Groups(), 1e-3, 2, lr_range_test_step_rate=1.0, lr_range_test_staircase=staircase)
    assert rates_used(schedule, 6) == pytest.approx([1e-3 * factor for factor in expected], rel=1e-12)


@given(width=durations, total=durations, kind=kinds, iteration=iterations)
def test_warmups_stay_between_their_rates_and_move_one_way(width: int, total: int, kind: Any, iteration: int) -> None:
    span: dict[str, Any] = {"warmup_min_lr": 0.125, "warmup_max_lr": 0.5, "warmup_num_steps": width}
    up = WarmupLR(Groups(), **span, warmup_type=kind)
    down = WarmupDecayLR(Groups(), total, **span, warmup_type=kind)
    cosine = WarmupCosineLR(Groups(), total, 0.25, width, 0.25, kind)
    for schedule in (up, down, cosine):
        now, later = schedule.lrs_at(iteration)[0], schedule.lrs_at(iteration + 1)[0]
        assert 0.125 <= now <= 0.5
        rising = schedule is up or iteration + 1 < max(2, width)
        assert now <= later if rising else (later <= now or iteration < max(2, width))
    assert up.lrs_at(max(2, width)) == [0.5]
    assert down.lrs_at(max(total, width + 1, 2) + 1) == cosine.lrs_at(max(total, width + 1, 2) + 1) == [0.125]


PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 7},
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 7},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 7},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 5, "decay_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "PhasedLR": {"phases": [{"steps": 9, "shape": "cosine", "start": 0.0, "end": 1.0}]},
    "WarmupStableDecayLR": {"total_num_steps": 20, "decay_num_steps": 7, "warmup_num_steps": 7},
    "WarmupCosineRestartsLR": {"cycle_num_steps": 5, "cycle_growth": 2.0},
    "WarmupInverseSqrtLR": {"warmup_num_steps": 7},
}


@pytest.mark.parametrize("name", SCHEDULES)
@given(done=st.integers(0, 40))
def test_a_resumed_schedule_goes_on_as_if_never_stopped(name: str, done: int) -> None:
    straight, resumed = Groups(), Groups()
    first = build_schedule(name, PARAMS[name], straight)
    for _ in range(done):
        first.step()
    second = build_schedule(name, PARAMS[name], resumed)
    second.load_state_dict(first.state_dict())
    assert first.state_dict() == {"last_batch_iteration": done - 1}
    assert resumed == straight
    first.step()
    second.step()
    assert resumed == straight


def test_a_schedule_constructed_in_the_middle_leaves_the_groups_until_its_next_step() -> None:
    groups = Groups([{"lr": 0.375}])
    schedule = WarmupLR(groups, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear", last_batch_iteration=2)
    assert groups.param_groups[0]["lr"] == 0.375
    schedule.step()
    assert groups.param_groups[0]["lr"] == 0.375  # iteration 3 of 4
    schedule.step()
    assert groups.param_groups[0]["lr"] == 0.5


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        WarmupLR(Groups()).load_state_dict({"last_epoch": 3})
    assert "last_batch_iteration" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "params", "key"),
    [
        ("warmuplr", {}, "scheduler.type"),
        ("Exponential", {}, "scheduler.type"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps"),
        ("WarmupLR", {"gamma": 3}, "scheduler.params.gamma"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps"),
        ("WarmupLR", {"warmup_type": "cubic"}, "scheduler.params.warmup_type"),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "scheduler.params.warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": True}, "scheduler.params.warmup_num_steps"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "scheduler.params.warmup_max_lr"),
        ("WarmupLR", {"warmup_max_lr": float("nan")}, "scheduler.params.warmup_max_lr"),
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, "scheduler.params.warmup_min_lr"),
        ("WarmupLR", {"warmup_min_lr": [-0.1]}, "scheduler.params.warmup_min_lr[0]"),
        ("WarmupLR", {"warmup_min_lr": 1.0, "warmup_max_lr": 0.1}, "scheduler.params.warmup_min_lr"),
        ("WarmupLR", {"last_batch_iteration": -2}, "scheduler.params.last_batch_iteration"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_max_mom": 1.0},
            "scheduler.params.cycle_max_mom",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": 1},
            "scheduler.params.cycle_momentum",
        ),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "scheduler.params.lr_range_test_step_size"),
    ],
)
def test_a_bad_parameter_is_refused_under_its_key(name: str, params: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule(name, params, Groups())
    assert caught.value.problems[0].key == key


def test_all_bad_parameters_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule("WarmupLR", {"warmup_num_steps": 0, "warmup_type": "x", "warmup_max_lr": -1}, Groups())
    keys = [problem.key for problem in caught.value.problems]
    assert keys == [f"scheduler.params.{key}" for key in ("warmup_max_lr", "warmup_num_steps", "warmup_type")]


def test_a_refused_schedule_leaves_the_groups_alone() -> None:
    groups = Groups()
    with pytest.raises(ConfigError):
        build_schedule("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "decay_step_size": -1}, groups)
    assert groups == Groups()
