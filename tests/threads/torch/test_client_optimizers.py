"""Optimizers and schedules that the user brings: they run on slices where that is right and are refused where not."""

from __future__ import annotations

import pytest
import torch
from pairwise import combinations
from parity_models import (
    SMALL,
    assert_bitwise,
    assert_close,
    grouped,
    make_config,
    on_threads,
    parity_loss,
    parity_model,
    snapshot,
    train_plainly,
)
from stage_cases import stages
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import polyaccel
from polyaccel.errors import CheckpointError, ConfigError, ShardingError

STEPS = 3
TORCH = torch.optim


def client_config(stage, **changes):
    config = make_config(stage, zero=SMALL, **changes)
    del config["optimizer"]
    return config


def train(communicator, model, config, optimizer, scheduler=None, steps=STEPS):
    """Train with a callable, or with an instance that it makes when `optimizer` is a pair (callable,)."""
    if isinstance(optimizer, tuple):
        optimizer = optimizer[0](grouped(model))
        scheduler = scheduler and scheduler(optimizer)
        arguments = {}
    else:
        arguments = {"model_parameters": grouped(model)}
    engine, *_ = polyaccel.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, **arguments
    )
    rates = []
    for step in range(steps):
        engine.backward(parity_loss(engine, step, 0, communicator.rank))
        rates.append(engine.get_lr())
        engine.step()
        assert engine.metrics.lr == tuple(rates[-1])
    return snapshot(engine.module), rates


def trained(world, config, optimizer, scheduler=None):
    """Rank 0's result of `train`; all ranks have the same."""
    results = on_threads(world, train, parity_model, config, optimizer, scheduler)
    for params, rates in results:
        assert_bitwise(params, results[0][0])
        assert rates == results[0][1]
    return results[0]


ELEMENTWISE = {
    "Adadelta": lambda groups: TORCH.Adadelta(groups, lr=0.5),
    "Adagrad": lambda groups: TORCH.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "Adam, amsgrad": lambda groups: TORCH.Adam(groups, lr=1e-2, amsgrad=True),
    "AdamW, one by one": lambda groups: TORCH.AdamW(groups, lr=1e-2, foreach=False),
    "AdamW, fused": lambda groups: TORCH.AdamW(groups, lr=1e-2, fused=True),
    "Adamax": lambda groups: TORCH.Adamax(groups, lr=1e-2),
    "ASGD": lambda groups: TORCH.ASGD(groups, lr=1e-2),
    "NAdam": lambda groups: TORCH.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: TORCH.RAdam(groups, lr=1e-2),
    "RMSprop, centred": lambda groups: TORCH.RMSprop(groups, lr=1e-2, momentum=0.9, centered=True),
    "SGD, nesterov": lambda groups: TORCH.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True),
}


@combinations(name=list(ELEMENTWISE), stage=[0, 1, 2], world=[1, 3], form=["instance", "callable"])
def test_elementwise_optimizers_equal_plain_torch(name, stage, world, form):
    make = ELEMENTWISE[name]
    params, _ = trained(world, client_config(stage, gradient_clipping=1.0), make if form == "callable" else (make,))
    assert_close(params, train_plainly(world, STEPS, clip=1.0, make_optimizer=make).params, 5e-6)


def test_rprop_equals_plain_torch_while_signs_agree():
    """Rprop looks at signs only; one step has none to disagree about."""

    def make(groups):
        return TORCH.Rprop([{"params": group["params"]} for group in groups], lr=1e-2)

    results = on_threads(2, train, parity_model, client_config(2), make, None, 1)
    assert_close(results[0][0], train_plainly(2, 1, make_optimizer=make).params)


@stages
def test_a_client_optimizer_updates_float32_masters_of_16_bit_parameters(stage):
    params, _ = trained(3, client_config(stage, bf16={"enabled": True}), ELEMENTWISE["NAdam"])
    plain = train_plainly(3, STEPS, param_dtype=torch.bfloat16, make_optimizer=ELEMENTWISE["NAdam"])
    assert params["wide.weight"].dtype is torch.bfloat16
    assert_close(params, plain.params, 0.02)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_an_optimizer_with_a_past_goes_on_from_it(accumulated):
    """State that the instance has already is cut over the ranks like its parameters."""

    def begin(model):
        optimizer = TORCH.AdamW(grouped(model), lr=1e-2)
        for step in range(accumulated):
            parity_loss(model, 50 + step, 0, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def go_on(communicator, model, stage):
        engine, *_ = polyaccel.initialize(model=model, optimizer=begin(model), config=client_config(stage))
        for step in range(STEPS):
            engine.backward(parity_loss(engine, step, 0, communicator.rank))
            engine.step()
        return snapshot(engine.module)

    model = parity_model()
    optimizer = begin(model)
    for step in range(STEPS):
        (sum(parity_loss(model, step, 0, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 1, 2):
        for params in on_threads(2, go_on, parity_model, stage):
            assert_close(params, snapshot(model))


def adafactor(groups):
    """Keeps row and column sums of a matrix: it must see whole parameters."""
    return TORCH.Adafactor(groups, lr=1e-2)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (3, 0), (3, 1), (2, 3)])
def test_an_optimizer_of_whole_parameters_has_them_at_every_stage(world, stage):
    params, _ = trained(world, client_config(stage, gradient_clipping=1.0), adafactor)
    assert_close(params, train_plainly(world, STEPS, clip=1.0, make_optimizer=adafactor).params, 5e-6)


class SignDescent(torch.optim.Optimizer):
    """Elementwise, but nobody knows: a class of the user's own."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["total"] = state.get("total", torch.zeros_like(parameter)) + parameter.grad
                    parameter.sub_(group["lr"] * torch.tanh(state["total"]) + group["weight_decay"] * 1e-3 * parameter)


def sign_descent(groups):
    return SignDescent(groups, lr=1e-2)


@stages
def test_an_unknown_optimizer_is_taken_at_its_user_s_word(stage):
    config = client_config(stage, zero_allow_untested_optimizer=True)
    assert_close(trained(3, config, sign_descent)[0], train_plainly(3, STEPS, make_optimizer=sign_descent).params)


class Remembers(SignDescent):
    """It keeps the norms of the last gradients besides, of which there are neither one nor as many as elements."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norms = self.state[parameter].get("norms", ())
                    self.state[parameter]["norms"] = (*norms, float(parameter.grad.norm()))


def test_a_state_that_a_checkpoint_has_no_place_for_is_refused_by_name(tmp_path):
    def save(communicator, model):
        optimizer = Remembers(grouped(model), lr=1e-2)
        config = client_config(2, zero_allow_untested_optimizer=True)
        engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        engine.step()
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(str(tmp_path))
        assert caught.value.value == "norms"
        engine.destroy()
        return caught.value.hint

    assert all('"stage": 0' in hint for hint in on_threads(3, save, parity_model))
    assert list(tmp_path.iterdir()) == []


def test_a_subclass_of_a_known_optimizer_is_unknown():
    class Tampered(TORCH.AdamW):
        pass

    with pytest.raises(ShardingError) as caught:
        on_threads(1, train, parity_model, client_config(2), lambda groups: Tampered(groups))
    assert caught.value.value == "Tampered"


@stages
def test_the_optimizer_s_groups_show_the_module_s_parameters(stage):
    """Nobody who walks over the groups meets a slice, whoever made the optimizer, before and after a step."""

    def look(communicator, model):
        client = TORCH.AdamW(grouped(model), lr=1e-2)
        engine, optimizer, *_ = polyaccel.initialize(model=model, optimizer=client, config=client_config(stage))
        wanted = [[id(parameter) for parameter in group["params"]] for group in grouped(model)]
        for step in range(2):
            for groups in (optimizer.param_groups, client.param_groups):
                assert [[id(parameter) for parameter in group["params"]] for group in groups] == wanted
            engine.backward(parity_loss(engine, step, 0, 0))
            engine.step()

    on_threads(2, look, parity_model)


# Schedules.


def halving(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def adamw(groups):
    return TORCH.AdamW(groups, lr=1e-2)


def plain_with_schedule(world, make_scheduler):
    """Plain torch with a schedule: `step` of the optimizer moves it along."""

    class Scheduled(TORCH.AdamW):
        def step(self):
            super().step()
            schedules[0].step()

    schedules = []

    def make(groups):
        optimizer = Scheduled(groups, lr=1e-2)
        schedules.append(make_scheduler(optimizer))
        return optimizer

    return train_plainly(world, STEPS, make_optimizer=make).params


@stages
@pytest.mark.parametrize("form", ["callable and native", "callable and callable", "instance and instance"])
def test_a_client_schedule_takes_effect_and_warns_nobody(stage, form):
    """Warnings are errors here: torch's about the order of calls too."""
    config = make_config(stage, zero=SMALL) if form.endswith("native") else client_config(stage)
    optimizer = {"callable and native": None, "callable and callable": adamw, "instance and instance": (adamw,)}[form]
    params, rates = trained(2, config, optimizer, halving)
    assert rates == [[1e-2, 2e-2], [5e-3, 1e-2], [2.5e-3, 5e-3]]
    assert_close(params, plain_with_schedule(2, halving))


@pytest.mark.parametrize("native", [True, False], ids=["native", "client"])
def test_a_schedule_of_torch_that_asks_the_optimizer_for_its_defaults(native):
    """OneCycleLR moves the momentum too, and looks into `optimizer.defaults` to see which one."""

    def one_cycle(optimizer):
        return OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=10)

    config = make_config(1, zero=SMALL) if native else client_config(1)
    params, _ = trained(2, config, None if native else adamw, one_cycle)
    assert_close(params, plain_with_schedule(2, one_cycle))


def test_a_schedule_of_torch_by_its_name_in_the_config():
    scheduler = {"type": "CosineAnnealingLR", "params": {"T_max": 4}}
    params, rates = trained(2, make_config(2, zero=SMALL, scheduler=scheduler), None)
    assert rates[0] == [1e-2, 2e-2]
    assert rates[1][0] < 1e-2
    assert_close(params, plain_with_schedule(2, lambda optimizer: CosineAnnealingLR(optimizer, 4)))


def test_a_schedule_of_ours_moves_a_client_optimizer():
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.4}}
    _, rates = trained(2, client_config(1, scheduler=scheduler), adamw)
    assert rates == [[0.0, 0.0], [0.0, 0.0], [0.1, 0.1]]


@pytest.mark.parametrize(
    ("scheduler", "optimizer", "key"),
    [
        ({"type": "HeatUpLR"}, True, "scheduler.type"),
        ({"type": "StepLR", "params": {"step": 3}}, True, "scheduler.params"),
        ({"type": "WarmupLR"}, False, "scheduler.type"),
    ],
    ids=["unknown", "misspelt", "no optimizer"],
)
def test_a_schedule_that_cannot_be_built(scheduler, optimizer, key: str):
    config = make_config(0, scheduler=scheduler) if optimizer else client_config(0, scheduler=scheduler)
    with pytest.raises(ConfigError) as caught:
        on_threads(1, lambda communicator, model: polyaccel.initialize(model=model, config=config), parity_model)
    assert caught.value.problems[0].key == key
