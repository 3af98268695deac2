"""Layers that are frozen when the engine is built and trained later, at every stage, as in plain torch whose optimizer
has all parameters from the start; and checkpoints from before and after."""

from __future__ import annotations

from functools import partial

import pytest
import stage_cases
import torch
from pairwise import combinations
from parity_models import assert_bitwise, assert_close, make_config, on_threads, snapshot
from stage3_models import WIDTH, Gpt, seeded, token_loss
from torch import nn

import polyaccel
from polyaccel.errors import ShardingError
from polyaccel.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
STAGES = {**stage_cases.STAGES, "stage 3, all on the host": (3, {**stage_cases.SHARDED, **ON_HOST})}
OPTIMIZERS = {
    "AdamW": ({"lr": 1e-2, "weight_decay": 0.1}, torch.optim.AdamW),
    "Adagrad": ({"lr": 1e-2, "initial_accumulator_value": 0.5}, torch.optim.Adagrad),
}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 25), nn.Linear(25, WIDTH)

    def forward(self, hidden):
        return hidden + self.narrow(torch.tanh(self.wide(self.norm(hidden))))


gpt = seeded(partial(Gpt, make_block=Mlp))


def config_at(stage, optimizer="AdamW", **changes):
    number, zero = STAGES[stage]
    section = {"type": optimizer, "params": OPTIMIZERS[optimizer][0]}
    return make_config(number, zero=zero, optimizer=section, **changes)


def groups_of(model):
    """Matrices and the rest, the frozen ones among them."""
    shapes = [[p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False)]
    return [{"params": shapes[0]}, {"params": shapes[1], "lr": 2e-2}]


def freeze_all_but_the_head(model):
    model.requires_grad_(False)
    model.head.requires_grad_(True)


SCHEDULE = [
    freeze_all_but_the_head,
    lambda model: model.blocks[2].requires_grad_(True),
    lambda model: None,
    lambda model: (model.blocks[1].requires_grad_(True), model.head.requires_grad_(False)),
    lambda model: model.requires_grad_(True),
    lambda model: None,
]
"""What happens to the model before each step."""


def engine_for(model, config):
    return polyaccel.initialize(model=model, model_parameters=groups_of(model), config=config)[0]


def train(engine, model, step):
    engine.backward(token_loss(engine, step, 0, engine.communicator.rank))
    engine.step()


def plainly(world, optimizer="AdamW", schedule=SCHEDULE):
    """Trained by plain torch; `optimizer` is a name of `OPTIMIZERS`, or makes one from groups."""
    model = gpt()
    params, kind = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else ({}, optimizer)
    optimizer = kind(groups_of(model), **params)
    for step, change in enumerate(schedule):
        change(model)
        (sum(token_loss(model, step, 0, rank) for rank in range(world)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@combinations(stage=list(STAGES), world=[2, 3, 1], optimizer=list(OPTIMIZERS), precision=["fp32", "bf16"])
def test_layers_are_unfrozen_one_after_the_other(stage, world, optimizer, precision):
    """In fp32 as plain torch; in bf16 what was trained before is kept to the bit."""

    def unfreeze(communicator, model):
        SCHEDULE[0](model)
        changes = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        engine = engine_for(model, config_at(stage, optimizer, **changes))
        head, state = model.head.weight, "exp_avg" if optimizer == "AdamW" else "sum"
        train(engine, model, 0)
        for step, change in enumerate(SCHEDULE[1:], start=1):
            known = [safe_get_full_fp32_param(head), safe_get_full_optimizer_state(head, state)]
            change(model)
            engine._train_unfrozen()
            again = [safe_get_full_fp32_param(head), safe_get_full_optimizer_state(head, state)]
            assert all(map(torch.equal, known, again))
            train(engine, model, step)
        engine.destroy()
        return snapshot(model)

    ranks = on_threads(world, unfreeze, gpt)
    for params in ranks:
        assert_bitwise(params, ranks[0])
        if precision == "fp32":
            assert_close(params, plainly(world, optimizer), 5e-6)


@pytest.mark.parametrize("stage", ["stage 0", "stage 2", "stage 3"])
@pytest.mark.parametrize("unfreeze_first", [False, True], ids=["loaded frozen", "loaded unfrozen"])
def test_a_run_goes_on_from_a_checkpoint_across_unfreezing(stage, unfreeze_first, tmp_path):
    """Saved after the third step, when two layers were trained, or after the first, when one was."""

    def interrupted(communicator, model):
        SCHEDULE[0](model)
        engine = engine_for(model, config_at(stage))
        for step, change in enumerate(SCHEDULE):
            if step == (3 if unfreeze_first else 1):
                engine.save_checkpoint(str(tmp_path))
                engine.destroy()
                model = gpt()
                SCHEDULE[0](model)
                if unfreeze_first:
                    engine = engine_for(model, config_at(stage))
                    SCHEDULE[1](model)  # after initialize, before the load
                else:
                    SCHEDULE[1](model)  # before initialize: states that were not saved begin
                    engine = engine_for(model, config_at(stage))
                engine.load_checkpoint(str(tmp_path))
            change(model)
            train(engine, model, step)
        engine.destroy()
        return snapshot(model)

    for params in on_threads(2, interrupted, gpt):
        assert_close(params, plainly(2), 5e-6)


def test_unfreezing_in_the_middle_of_an_accumulation_is_refused_by_name():
    def unfreeze(communicator, model):
        SCHEDULE[0](model)
        engine = engine_for(model, config_at("stage 2", accumulation=2))
        engine.backward(token_loss(engine, 0, 0, communicator.rank))
        engine.step()
        model.scale.requires_grad_(True)
        engine.backward(token_loss(engine, 0, 1, communicator.rank))
        with pytest.raises(ShardingError) as caught:
            engine.step()
        assert caught.value.value == "scale"
        assert "between optimizer steps" in caught.value.hint

    on_threads(2, unfreeze, gpt)


# Checkpoints of what is frozen where they are loaded.

FREEZING = [
    lambda model: None,
    lambda model: None,
    lambda model: model.blocks[1].requires_grad_(False),
    lambda model: None,
    lambda model: model.requires_grad_(True),
    lambda model: None,
]
"""A layer is trained, frozen and trained again."""


@pytest.mark.parametrize(
    ("stage", "client", "before_initialize"),
    [
        ("stage 0", True, True),
        ("stage 2", False, False),
        ("stage 2, states on the host", False, True),
        ("stage 3", True, True),
        ("stage 3", False, True),
    ],
)
def test_states_of_frozen_layers_are_kept_by_a_load(stage, client, before_initialize, tmp_path):
    """Saved and loaded while a layer is frozen that was trained before, and is later. Its states are there again,
    whether it is frozen before the new engine is built or after."""

    def interrupted(communicator, model):
        engine = engine_with(model, stage, client)
        for step, change in enumerate(FREEZING):
            if step == 4:
                engine.save_checkpoint(str(tmp_path))
                engine.destroy()
                model = gpt()
                if before_initialize:
                    FREEZING[2](model)
                engine = engine_with(model, stage, client)
                FREEZING[2](model)
                engine.load_checkpoint(str(tmp_path))
                assert not model.blocks[1].narrow.weight.requires_grad
            change(model)
            train(engine, model, step)
        engine.destroy()
        return snapshot(model)

    wanted = plainly(2, client_optimizer if client else "AdamW", FREEZING)
    for params in on_threads(2, interrupted, gpt):
        assert_close(params, wanted, 5e-6)


def client_optimizer(groups):
    return torch.optim.NAdam(groups, lr=1e-2)  # with numbers beside the states of its elements


def engine_with(model, stage, client):
    """An engine with the config's AdamW, or a client's NAdam."""
    config = config_at(stage)
    if not client:
        return engine_for(model, config)
    del config["optimizer"]
    return polyaccel.initialize(model=model, optimizer=client_optimizer(groups_of(model)), config=config)[0]


@pytest.mark.parametrize(("stage", "client"), [("stage 0", True), ("stage 3", False)])
def test_a_run_that_goes_back_begins_anew_what_was_frozen_then(stage, client, tmp_path):
    """An engine that loads what it saved before it unfroze a layer has no states of that layer any more."""

    def back(communicator, model):
        SCHEDULE[0](model)
        engine = engine_with(model, stage, client)
        train(engine, model, 0)
        engine.save_checkpoint(str(tmp_path))
        model.requires_grad_(True)
        for step in (7, 8):
            train(engine, model, step)
        engine.load_checkpoint(str(tmp_path))
        SCHEDULE[0](model)
        for step, change in enumerate(SCHEDULE[1:], start=1):
            change(model)
            train(engine, model, step)
        engine.destroy()
        return snapshot(model)

    wanted = plainly(2, client_optimizer if client else "AdamW")
    for params in on_threads(2, back, gpt):
        assert_close(params, wanted, 5e-6)


def test_a_load_that_lays_out_anew_is_refused_while_gradients_are_held(tmp_path):
    def load(communicator, model):
        engine = engine_for(model, config_at("stage 2"))
        train(engine, model, 0)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        model = gpt()
        SCHEDULE[0](model)
        engine = engine_for(model, config_at("stage 2"))
        engine.backward(token_loss(engine, 0, 0, communicator.rank))
        with pytest.raises(ShardingError) as caught:
            engine.load_checkpoint(str(tmp_path))
        assert caught.value.value == "blocks.0.narrow.bias"
        assert "engine.zero_grad()" in caught.value.hint
        engine.zero_grad()
        engine.load_checkpoint(str(tmp_path))

    on_threads(2, load, gpt)


def test_states_that_this_run_cannot_keep_are_named_in_a_warning(tmp_path, caplog):
    def load(communicator, model):
        engine = engine_for(model, config_at("stage 1"))
        train(engine, model, 0)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        model = gpt()
        model.scale.requires_grad_(False)
        groups = groups_of(model)
        for group in groups:
            group["params"] = [one for one in group["params"] if one is not model.scale]
        engine = polyaccel.initialize(model=model, model_parameters=groups, config=config_at("stage 1"))[0]
        engine.load_checkpoint(str(tmp_path))
        engine.destroy()

    on_threads(2, load, gpt)
    said = [record.getMessage() for record in caplog.records if "in no group" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("they are left out: scale")


# Optimizers of the user's own.

OWN = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "NAdam": client_optimizer,
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.5),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}
"""The last one needs whole parameters."""


@pytest.mark.parametrize(
    ("stage", "world", "optimizer", "given"),
    [
        ("stage 0", 2, "Adafactor", "an optimizer"),
        ("stage 2", 3, "Adafactor", "an optimizer"),
        ("stage 3", 2, "Adafactor", "a function"),
        ("stage 0", 1, "SGD", "an optimizer"),
        ("stage 1", 3, "Adagrad", "a function"),
        ("stage 2", 2, "NAdam", "an optimizer"),
        ("stage 2, states on the host", 2, "Adagrad", "an optimizer"),
        ("stage 3", 3, "NAdam", "a function"),
    ],
)
def test_layers_are_unfrozen_under_an_optimizer_of_the_users_own(stage, world, optimizer, given):
    def unfreeze(communicator, model):
        SCHEDULE[0](model)
        config = config_at(stage)
        del config["optimizer"]
        make = OWN[optimizer]
        arguments = {"optimizer": make(groups_of(model))}
        if given == "a function":
            arguments = {"optimizer": make, "model_parameters": groups_of(model)}
        engine = polyaccel.initialize(model=model, config=config, **arguments)[0]
        train(engine, model, 0)
        for step, change in enumerate(SCHEDULE[1:], start=1):
            change(model)
            train(engine, model, step)
        engine.destroy()
        return snapshot(model)

    ranks = on_threads(world, unfreeze, gpt)
    for params in ranks:
        assert_bitwise(params, ranks[0])
        assert_close(params, plainly(world, OWN[optimizer]), 1e-5)


class Blockwise(torch.optim.SGD):
    """Keeps a state for each two elements, as optimizers of 8 bits keep scales."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["scales"] = torch.ones(parameter.numel() // 2 + 2)


def test_states_that_cannot_be_laid_out_anew_are_refused_by_name():
    def unfreeze(communicator, model):
        SCHEDULE[0](model)
        config = config_at("stage 2", zero_allow_untested_optimizer=True)
        del config["optimizer"]
        engine = polyaccel.initialize(model=model, optimizer=Blockwise(groups_of(model), lr=1e-2), config=config)[0]
        train(engine, model, 0)
        SCHEDULE[1](model)
        with pytest.raises(ShardingError) as caught:
            train(engine, model, 1)
        assert caught.value.value == "scales"
        assert "'embed.weight'" in str(caught.value)
        assert "at polyaccel.initialize" in caught.value.hint
        model.blocks[2].requires_grad_(False)
        train(engine, model, 1)  # nothing has changed

    on_threads(2, unfreeze, gpt)
