"""Schedules of phases have the values of torch's and transformers' own, and of the papers' formulas."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.engine.lr_curves import Phase, phases_ratio, restarts
from polyaccel.engine.lr_schedules import SCHEDULES, build_schedule
from polyaccel.errors import ConfigError

LR = 0.5


def ours(name: str, steps: int, **params: Any) -> list[float]:
    """The rates at which the first optimizer steps run."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    schedule = build_schedule(name, params, optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return used


def theirs(make: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    schedule = make(optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_wsd_is_transformers(decay: str) -> None:
    from transformers import get_wsd_schedule

    expected = theirs(
        lambda one: get_wsd_schedule(
            one, num_warmup_steps=4, num_stable_steps=7, num_decay_steps=9, decay_type=decay, min_lr_ratio=0.1
        ),
        26,
    )
    params = {
        "warmup_num_steps": 4,
        "total_num_steps": 20,
        "decay_num_steps": 9,
        "min_ratio": 0.1,
        "warmup_min_ratio": 0.1,
    }
    assert ours("WarmupStableDecayLR", 26, **params, decay_type=decay) == pytest.approx(expected, rel=1e-12)


def test_inverse_sqrt_is_transformers_and_the_papers() -> None:
    from transformers import get_inverse_sqrt_schedule

    found = ours("WarmupInverseSqrtLR", 50, warmup_num_steps=8)
    assert found == pytest.approx(theirs(lambda one: get_inverse_sqrt_schedule(one, 8), 50), rel=1e-12)
    # Vaswani et al. 2017, equation 3, with a peak of LR at step 8.
    assert found[1:] == pytest.approx([LR * 8**0.5 * min(n**-0.5, n * 8**-1.5) for n in range(1, 50)], rel=1e-12)


@pytest.mark.parametrize("growth", [1, 2])
def test_restarts_are_torchs(growth: int) -> None:
    kind = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
    expected = theirs(lambda one: kind(one, T_0=5, T_mult=growth, eta_min=0.1 * LR), 40)
    found = ours("WarmupCosineRestartsLR", 40, cycle_num_steps=5, cycle_growth=float(growth), min_ratio=0.1)
    assert found == pytest.approx(expected, rel=1e-12)


def test_each_top_is_lower_by_its_factor() -> None:
    found = ours("WarmupCosineRestartsLR", 12, cycle_num_steps=4, top_factor=0.5, warmup_num_steps=2)
    assert found[:3] == [0.0, LR / 2, LR]
    assert [found[2], found[6], found[10]] == pytest.approx([LR, LR / 2, LR / 4])


def test_falls_have_the_papers_shapes() -> None:
    params = {"total_num_steps": 8, "decay_num_steps": 8, "min_ratio": 0.25}
    root = ours("WarmupStableDecayLR", 9, **params)
    assert root == pytest.approx([LR * (1 - 0.75 * math.sqrt(n / 8)) for n in range(9)])
    powers = ours("WarmupStableDecayLR", 9, **params, decay_type="exponential")
    assert powers == pytest.approx([LR * 0.25 ** (n / 8) for n in range(9)])


phases = st.lists(
    st.builds(
        Phase,
        st.integers(1, 9),
        st.sampled_from(["linear", "cosine", "sqrt", "exponential"]),
        st.floats(0.1, 2),
        st.floats(0.1, 2),
    ),
    min_size=1,
    max_size=4,
)


@given(phases, st.integers(0, 60))
def test_a_list_of_phases_stays_between_their_ends(each: list[Phase], step: int) -> None:
    ratio = phases_ratio(each, step)
    before = 0
    for phase in each:
        if step < before + phase.steps:
            assert ratio == phase.ratio_at(step - before)
            assert min(phase.start, phase.end) - 1e-9 <= ratio <= max(phase.start, phase.end) + 1e-9
            return
        before += phase.steps
    assert ratio == each[-1].end


def test_a_config_writes_phases_as_data() -> None:
    data = [
        {"steps": 2, "start": 0.0, "end": 1.0},
        {"steps": 2, "shape": "constant", "start": 1.0, "end": 1.0},
        {"steps": 4, "shape": "inverse_sqrt", "start": 1.0, "end": 0.5},
    ]
    found = ours("PhasedLR", 20, phases=data)
    assert found[:5] == [0.0, LR / 2, LR, LR, LR]
    assert found[4:] == pytest.approx([LR * max(0.5, (4 / (4 + n)) ** 0.5) for n in range(16)])


def test_cycles_grow_without_end() -> None:
    cycles = islice(restarts(first=3, growth=1.5, top_factor=1.0, floor_ratio=0.0), 5)
    assert [phase.steps for phase in cycles] == [3, 4, 7, 10, 15]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("PhasedLR", {"phases": []}),
        ("PhasedLR", {"phases": [{"steps": 1, "shape": "exponential", "start": 0.0, "end": 1.0}]}),
        ("PhasedLR", {"phases": [{"steps": 1, "shape": "constant", "start": 0.0, "end": 1.0}]}),
        ("PhasedLR", {"phases": [{"steps": 1, "shape": "inverse_sqrt", "start": 1.0, "end": 0.0}] * 2}),
        ("PhasedLR", {"phases": [{"steps": 0, "start": 0.0, "end": 1.0}]}),
        ("WarmupStableDecayLR", {"total_num_steps": 4, "decay_num_steps": 3, "warmup_num_steps": 2}),
        ("WarmupStableDecayLR", {"total_num_steps": 4, "decay_num_steps": 3, "decay_type": "exponential"}),
        ("WarmupStableDecayLR", {"total_num_steps": 4}),
        ("WarmupCosineRestartsLR", {"cycle_num_steps": 4, "cycle_growth": 0.5}),
        ("WarmupInverseSqrtLR", {"warmup_num_steps": 0}),
    ],
)
def test_nonsense_is_refused(name: str, params: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    with pytest.raises(ConfigError):
        build_schedule(name, params, optimizer)


def test_the_state_is_one_number() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    params = {"cycle_num_steps": 4}
    first = SCHEDULES["WarmupCosineRestartsLR"](optimizer, **params)
    for _ in range(6):
        first.step()
    rate = first.get_last_lr()
    second = SCHEDULES["WarmupCosineRestartsLR"](torch.optim.SGD([torch.zeros(1)], lr=LR), **params)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == rate
