"""Learning-rate schedules by DeepSpeed's attributes, and calls that are an AssertionError there."""

from __future__ import annotations

import math
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.elasticity import compute_elastic_config
from deepspeed.elasticity.config import ElasticityError
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from torch import nn

from polyaccel import PolyaccelError


def two_groups(lr: Any = (0.1, 0.2)) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in lr]
    return torch.optim.Adam(groups, betas=(0.9, 0.99))


def test_warmups_show_their_rates() -> None:
    plain = WarmupLR(two_groups(), warmup_num_steps=10)
    assert (plain.max_lrs, plain.min_lrs, plain.warmup_type) == ([0.1, 0.2], [0.0, 0.0], "log")
    cosine = WarmupCosineLR(two_groups(), total_num_steps=100, warmup_num_steps=10)
    assert cosine.get_lr_ratio() == 0.0
    cosine.step(1)
    assert cosine.get_lr_ratio() == pytest.approx(math.log(2) / math.log(10))
    assert cosine.get_lr() == pytest.approx([lr * cosine.get_lr_ratio() for lr in (0.1, 0.2)])


def test_an_unknown_type_of_warmup_is_log() -> None:
    kinds: list[tuple[Any, dict[str, int]]] = [(WarmupLR, {}), (WarmupDecayLR, {"total_num_steps": 20})]
    for kind, more in [*kinds, (WarmupCosineLR, {"total_num_steps": 20})]:
        found = kind(two_groups(), warmup_num_steps=10, warmup_type="lgo", **more)
        wanted = kind(two_groups(), warmup_num_steps=10, warmup_type="log", **more)
        assert found.warmup_type == "log"
        for step in range(12):
            found.step(step)
            wanted.step(step)
            assert found.get_lr() == wanted.get_lr()


def test_a_cycle_shows_its_momenta_and_begins_at_the_lowest() -> None:
    optimizer = two_groups()
    rates = {"cycle_min_lr": [0.001, 0.002], "cycle_max_lr": [0.01, 0.02]}
    momenta = {"cycle_min_mom": [0.8, 0.85], "cycle_max_mom": [0.9, 0.95]}
    cycle = OneCycle(optimizer, **rates, **momenta, cycle_first_step_size=5, cycle_second_step_size=0)
    assert (cycle.min_lrs, cycle.max_lrs, cycle.step_ratio) == ([0.001, 0.002], [0.01, 0.02], 1.0)
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.8, 0.85]
    assert cycle.get_mom() == [(0.9, 0.99), (0.95, 0.99)]
    cycle.step(3)
    assert cycle.get_mom() == [group["betas"] for group in optimizer.param_groups]
    assert cycle.get_lr()[0] > 0.008
    cycle.step()
    assert cycle.get_lr() == pytest.approx([0.001, 0.002])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_is_a_tensor_stays_one(shape: tuple[int, ...]) -> None:
    rate = torch.full(shape, 0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = WarmupLR(optimizer, warmup_num_steps=10)
    schedule.step(10)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(schedule.get_lr()[0])


def test_calls_inside_no_sync_are_assertion_errors() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)

    def nested() -> None:
        with engine.no_sync():
            pass

    def coalesced() -> None:
        with engine.coalesce_grad_reduction():
            pass

    for outer in (engine.no_sync, engine.coalesce_grad_reduction):
        for call in (nested, coalesced, engine.step):
            with outer(), pytest.raises(AssertionError) as caught:
                call()
            assert isinstance(caught.value, PolyaccelError)
            assert caught.value.hint
    engine.destroy()
    deepspeed.comm.destroy_process_group()


def test_a_version_without_elasticity_is_refused() -> None:
    section = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2], "version": 0.1}
    with pytest.raises(ElasticityError) as caught:
        compute_elastic_config({"elasticity": section}, "0.2")
    assert caught.value.value == "0.2"
    compute_elastic_config({"elasticity": section}, "0.3.8")


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_a_config_s_schedule_is_the_class_that_scripts_ask_for(name: str) -> None:
    params = {"WarmupDecayLR": {"total_num_steps": 9}, "WarmupCosineLR": {"total_num_steps": 9}}
    params["OneCycle"] = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": name, "params": params.get(name, {})},
    }
    try:
        engine, optimizer, _, schedule = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
        assert isinstance(schedule, getattr(lr_schedules, name))
        if name == "OneCycle":
            assert optimizer.param_groups[0]["betas"][0] == 0.8
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    finally:
        deepspeed.comm.destroy_process_group()
