"""The loss scale moves as a simulation by the book does, tolerates what it should, and gives up with a name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.engine.loss_scale import LossScaler
from polyaccel.errors import CheckpointError, ConfigError, LossScaleError

settings = st.fixed_dictionaries(
    {
        "initial_scale_power": st.integers(2, 16),
        "loss_scale_window": st.integers(1, 6),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "min_loss_scale": st.sampled_from([1.0, 1.5, 4.0]),
    }
)
# Runs of good steps and of overflows: single draws hardly ever give a window's worth of either.
runs = st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=12)
histories = runs.map(lambda runs: [overflow for overflow, length in runs for _ in range(length)])


def by_the_book(settings: dict[str, Any], history: list[bool]) -> list[float | None]:
    """The scale after each step by DeepSpeed's rules, each step judged from the whole history; None where it gives up.

    Kept naive on purpose: no counter survives from one step to the next except the scale and the tolerance.
    """
    scale, tolerance = 2.0 ** settings["initial_scale_power"], settings["hysteresis"]
    scales: list[float | None] = []
    for now, overflow in enumerate(history):
        if overflow and tolerance > 1:
            tolerance -= 1
        elif overflow and scale == settings["min_loss_scale"]:
            return [*scales, None]
        elif overflow:
            scale = max(settings["min_loss_scale"], scale / 2)
        else:
            last_overflow = max((step for step in range(now) if history[step]), default=-1)
            stable = now - last_overflow - 1
            grows = stable > 0 and stable % settings["loss_scale_window"] == 0
            if grows:
                scale *= 2
            if grows or settings["consecutive_hysteresis"]:
                tolerance = settings["hysteresis"]
        scales.append(scale)
    return scales


@given(settings, histories)
def test_the_scale_follows_the_rules(settings: dict[str, Any], history: list[bool]) -> None:
    scaler = LossScaler.from_config(**settings)
    for overflow, expected in zip(history, by_the_book(settings, history), strict=False):
        if expected is None:
            with pytest.raises(LossScaleError):
                scaler.update(overflow)
            return
        scaler.update(overflow)
        assert scaler.loss_scale == expected


@given(settings, histories, histories)
def test_a_resumed_scale_goes_on_as_if_never_stopped(
    settings: dict[str, Any], before: list[bool], after: list[bool]
) -> None:
    straight = LossScaler.from_config(**settings)
    run(straight, before)
    resumed = LossScaler.from_config(**settings)
    resumed.load_state_dict(straight.state_dict())
    assert run(straight, after) == run(resumed, after)
    assert straight.state_dict() == resumed.state_dict()


def run(scaler: LossScaler, history: list[bool]) -> bool:
    """Whether the scaler lived to the end of `history`."""
    try:
        for overflow in history:
            scaler.update(overflow)
    except LossScaleError:
        return False
    return True


def test_defaults_double_after_a_thousand_good_steps_and_halve_at_the_second_overflow() -> None:
    scaler = LossScaler.from_config()
    assert scaler.dynamic
    scaler.update(True)
    assert scaler.loss_scale == 2.0**16
    scaler.update(True)
    assert scaler.loss_scale == 2.0**15
    for _ in range(1000):
        scaler.update(False)
    assert scaler.loss_scale == 2.0**15
    scaler.update(False)
    assert scaler.loss_scale == 2.0**16


@pytest.mark.parametrize(("consecutive", "good_steps", "tolerated"), [(False, 2, 0), (False, 3, 1), (True, 1, 1)])
def test_tolerance_comes_back_with_growth_or_with_any_good_step(
    consecutive: bool, good_steps: int, tolerated: int
) -> None:
    scaler = LossScaler.from_config(loss_scale_window=2, hysteresis=2, consecutive_hysteresis=consecutive)
    scaler.update(True)
    for _ in range(good_steps):
        scaler.update(False)
    before = scaler.loss_scale
    scaler.update(True)
    assert scaler.loss_scale == (before if tolerated else before / 2)


def test_the_minimum_names_the_parameter_and_the_cure() -> None:
    scaler = LossScaler.from_config(initial_scale_power=1, hysteresis=1)
    scaler.update(True, culprit="blocks.3.mlp.weight")
    assert scaler.loss_scale == 1.0
    with pytest.raises(LossScaleError) as caught:
        scaler.update(True, culprit="blocks.3.mlp.weight")
    assert "bf16" in str(caught.value)
    assert caught.value.value == "blocks.3.mlp.weight"
    with pytest.raises(LossScaleError) as caught:
        scaler.update(True)
    assert "fp16.min_loss_scale" in str(caught.value)


@pytest.mark.parametrize("scaler", [LossScaler(), LossScaler.from_config(loss_scale=128.0)], ids=["unit", "static"])
def test_a_static_scale_never_moves(scaler: LossScaler) -> None:
    before = scaler.loss_scale
    for overflow in [True] * 5 + [False] * 2000:
        scaler.update(overflow)
    assert scaler.loss_scale == before
    scaler.load_state_dict({"loss_scale": 4.0, "good_steps": 1, "tolerance": 1})
    assert scaler.loss_scale == before
    assert not scaler.dynamic


@pytest.mark.parametrize(
    ("numbers", "key"),
    [
        ({"loss_scale": -1.0}, "fp16.loss_scale"),
        ({"loss_scale": float("inf")}, "fp16.loss_scale"),
        ({"loss_scale_window": 0}, "fp16.loss_scale_window"),
        ({"hysteresis": 0}, "fp16.hysteresis"),
        ({"min_loss_scale": 0.0}, "fp16.min_loss_scale"),
        (
            {"min_loss_scale": 8.0, "initial_scale_power": 2},
            "fp16.min_loss_scale",
        ),
        ({"initial_scale_power": 5000}, "fp16.initial_scale_power"),
    ],
)
def test_impossible_numbers_are_refused_under_their_key(numbers: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LossScaler.from_config(**numbers)
    assert caught.value.problems[0].key == key


@pytest.mark.parametrize("broken", [{}, {"loss_scale": 0.0, "good_steps": 0, "tolerance": 1}, {"cur_scale": 2.0}])
def test_a_broken_state_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        LossScaler.from_config().load_state_dict(broken)
    assert "LossScaler.state_dict()" in str(caught.value)
