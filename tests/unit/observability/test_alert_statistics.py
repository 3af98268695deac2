"""What alarms say of figures: of each kind of trouble one sentence, of steady noise none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.config.sections.timers import AlertsConfig
from polyaccel.observability.alerts.machines import MachineAlarms
from polyaccel.observability.alerts.replicas import alarms_of_digests
from polyaccel.observability.alerts.robust import MonotonicGrowth, Window
from polyaccel.observability.alerts.settings import AlarmSettings, DigestReport, RankFigures
from polyaccel.observability.alerts.training import TrainingAlarms
from polyaccel.observability.metrics import Alarm, StepMetrics

SETTINGS = AlarmSettings(**AlertsConfig().model_dump(exclude={"enabled"}))
SEEDS = st.integers(0, 2**32 - 1)


def step(number: int, norm: float = 1.0, lr: float = 0.1, *, skipped: bool = False) -> StepMetrics:
    return StepMetrics(step=number, loss=None, lr=(lr,), grad_norm=norm, skipped=skipped)


def look(losses: Sequence[float], norms: Sequence[float] = (), lrs: Sequence[float] = ()) -> list[Alarm]:
    alarms = TrainingAlarms(SETTINGS)
    found: list[Alarm] = []
    for at, loss in enumerate(losses):
        figures = step(at + 1, norms[at] if norms else 1.0, lrs[at] if lrs else 0.1)
        found += alarms.look(figures, {0: loss - 0.01, 1: loss + 0.01})
    return found


def told(rank: int, own_s: dict[str, float] | None = None, *, memory: int = 1 << 30, place: int = 0) -> RankFigures:
    """Ten steps of a second each."""
    own_s = {"data": 0.1, "forward": 2.0, "backward": 4.0} if own_s is None else own_s
    return RankFigures(rank, place, {}, 10, 10.0, own_s, memory, 4 << 30)


def test_a_loss_that_jumps_is_told_with_its_step_and_its_cure() -> None:
    noise = np.random.default_rng(0)
    losses = [2.0 + 0.05 * noise.standard_normal() for _ in range(60)]
    losses[45] = 6.0
    (alarm,) = look(losses)
    assert (alarm.kind, alarm.step) == ("loss", 46)
    assert alarm.value > SETTINGS.loss
    assert alarm.sentence.startswith("the loss of step 46 is 6, most on rank 1 (6.01), ")
    assert alarm.sentence.endswith("look at the batch of that step, lower the learning rate, or set gradient_clipping")


def test_a_loss_that_is_no_number_is_told_at_once() -> None:
    alarms = TrainingAlarms(SETTINGS)
    (alarm,) = alarms.look(step(1), {0: 2.0, 3: nan})
    assert (alarm.kind, alarm.ranks) == ("loss", (3,))
    assert alarm.sentence.startswith("the loss of step 1 is nan on rank 3: ")


def test_a_norm_that_explodes_is_told() -> None:
    noise = np.random.default_rng(1)
    norms = [float(one) for one in np.exp(0.2 * noise.standard_normal(60))]
    norms[50] = 100.0
    (alarm,) = look([1.0] * 60, norms)
    assert (alarm.kind, alarm.step) == ("grad_norm", 51)
    assert "the norm of the gradients of step 51 is 100," in alarm.sentence
    (alarm,) = TrainingAlarms(SETTINGS).look(step(1, inf), {})
    assert "they were applied" in alarm.sentence


def test_nothing_is_said_of_the_first_steps_nor_of_those_that_were_skipped() -> None:
    assert look([*[2.0] * 10, 100.0]) == []
    alarms = TrainingAlarms(SETTINGS)
    assert [*alarms.look(step(1, inf, skipped=True), {0: inf})] == []


def test_nothing_is_said_while_the_learning_rate_warms_up() -> None:
    """The same jump of loss and norm, in a schedule's warm-up and behind it."""
    losses, norms = [2.0] * 100, [1.0] * 100
    losses[40], norms[41] = 20.0, 30.0
    assert look(losses, norms, [0.001 * at for at in range(100)]) == []
    assert [one.kind for one in look(losses, norms)] == ["loss", "grad_norm"]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(1e-6, 1e6), st.floats(0, 0.3), st.sampled_from(["normal", "uniform", "skewed"]))
def test_steady_noise_raises_no_alarm(seed: int, scale: float, spread: float, kind: str) -> None:
    """Losses that go down or stay, and norms that scatter over an order of magnitude."""
    noise = np.random.default_rng(seed)
    scatter = noise.uniform(-1, 1, 120) if kind == "uniform" else noise.standard_normal(120)
    around = np.exp(spread * scatter) if kind == "skewed" else 1 + 0.3 * spread * scatter
    trend = np.linspace(2, 1, 120)
    losses = [float(one) for one in scale * trend * around]
    norms = [float(one) for one in scale * np.exp(2 * spread * noise.standard_normal(120))]
    alarms = TrainingAlarms(SETTINGS)
    assert [one for at in range(120) for one in alarms.look(step(at + 1, norms[at]), {0: losses[at]})] == []


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.001, 0.04))
def test_ranks_that_scatter_raise_no_alarm(seed: int, spread: float) -> None:
    noise, alarms = np.random.default_rng(seed), MachineAlarms(SETTINGS)
    for at in range(100):
        ranks = []
        for rank in range(4):
            own_s = {"forward": 3 + float(spread * noise.standard_normal()), "data": 0.1}
            ranks.append(told(rank, own_s, memory=int((1 << 30) * (1 + spread * noise.uniform()))))
        assert [*alarms.look(10 * at, ranks)] == []


def test_a_straggler_is_named_with_the_phase_and_not_for_one_pause() -> None:
    alarms = MachineAlarms(SETTINGS)
    slow = told(2, {"data": 0.1, "forward": 2.1, "backward": 7.0})
    assert [*alarms.look(10, [told(0), told(1), slow])] == []
    for at in (20, 30):
        assert [*alarms.look(at, [told(0), told(1), slow])] == []
    assert [*alarms.look(40, [told(0), told(1), told(2)])] == []
    for at in (50, 60):
        assert [*alarms.look(at, [told(0), told(1), slow])] == []
    (alarm,) = alarms.look(70, [told(0), told(1), slow])
    assert (alarm.kind, alarm.ranks, alarm.value) == ("straggler", (2,), pytest.approx(0.31))
    assert alarm.sentence.startswith(
        "all wait for rank 2, 31 % of each step up to 70: its own work takes 920 ms, that of the others 610 ms, most "
        "of it in backward: look for "
    )


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    alarms = MachineAlarms(SETTINGS)
    for at in range(8):
        assert [*alarms.look(at, [told(0), told(1, {"forward": 9.0}, place=1)])] == []


def test_a_loader_that_starves_training_is_told() -> None:
    alarms = MachineAlarms(SETTINGS)
    hungry = told(1, {"data": 4.0, "forward": 2.0})
    found = [[*alarms.look(at, [told(0), hungry])] for at in (10, 20, 30, 40)]
    assert found[:3] == [[]] * 3
    (alarm,) = found[3]
    assert (alarm.kind, alarm.ranks, alarm.value) == ("data", (1,), 0.4)
    assert alarm.sentence.startswith("rank 1 waits for its data 40 % of each step up to 40: give the loader workers")


def test_memory_that_creeps_up_is_told_with_the_steps_that_are_left() -> None:
    alarms = MachineAlarms(SETTINGS)
    noise = np.random.default_rng(2)
    found: list[Alarm] = []
    for at in range(60):
        leaked = at * (4 << 20) + int(noise.uniform(0, 1 << 20))
        found += alarms.look(10 * at, [told(0), told(1, memory=(1 << 30) + leaked)])
    assert {(one.kind, one.ranks) for one in found} == {("memory", (1,))}
    assert "the memory of rank 1 creeps up: " in found[0].sentence
    assert "look for what keeps tensors over steps" in found[0].sentence
    assert found[0].step == 160, "the first look counts for nothing; then sixteen"


def test_a_slow_leak_in_much_noise_is_found_at_a_longer_scale() -> None:
    noise, creep = np.random.default_rng(3), MonotonicGrowth()
    values = [1000 + 0.5 * at + float(noise.uniform(0, 20)) for at in range(400)]
    found = [(at, told) for at, value in enumerate(values) if (told := creep.add(value)) is not None]
    assert found
    first, last, looks = found[0][1]
    assert looks > 12
    assert last - first == pytest.approx(0.5 * looks, rel=0.5)


def test_deviations_are_those_of_normal_noise() -> None:
    window = Window(2000, 0.0)
    for one in np.random.default_rng(4).normal(100.0, 2.0, 2000):
        window.add(float(one))
    assert window.rise(110.0) == pytest.approx(5.0, rel=0.1)
    assert window.rise(90.0) == 0.0


def test_one_copy_among_three_is_named_and_of_two_nobody_knows() -> None:
    def digests(rank: int, *values: int) -> RankFigures:
        named = [DigestReport(7, f"layer.{at}", 0, (0, 1, 2), value) for at, value in enumerate(values)]
        return replace(told(rank), digests=named)

    assert [*alarms_of_digests([digests(rank, 1, 2) for rank in range(3)])] == []
    (alarm,) = alarms_of_digests([digests(0, 1, 2), digests(1, 9, 9), digests(2, 1, 2)])
    assert (alarm.kind, alarm.step, alarm.ranks) == ("replicas", 7, (1,))
    assert alarm.sentence.startswith(
        "rank 1 computed step 7 with other weights of 'layer.0' and 1 more than the 2 others:"
    )
    (alarm,) = alarms_of_digests([digests(0, 1, 2), digests(1, 1, 3)])
    assert alarm.ranks == (0, 1)
    assert alarm.sentence.startswith("ranks 0, 1 computed step 7 with different weights of 'layer.1':")
