"""Proofs at the first step of models that a script built as `PipelineModule`s of several stages."""

from __future__ import annotations

import gc
import random
import weakref
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from pipeline_models import micro_batch, pipeline_config, plain_layers, tied_layers, words
from planted_change import plant
from proof_verdicts import pass_on_verdicts, prove_as_users_do
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.config import load_config
from polyaccel.engine.runtime import build
from polyaccel.errors import VerificationError
from polyaccel.torch.engine.stage_executor import StageExecutor
from polyaccel.torch.pipeline import LayerSpec, PipelineModule
from polyaccel.torch.pipeline.exchange import StageExchange
from polyaccel.torch.pipeline.ties import TiedWeights
from polyaccel.torch.rewrites.stages import PipelineLayers
from polyaccel.torch.verify.first_step import FirstStepProof
from polyaccel.torch.verify.functions import trained_part_of
from polyaccel.torch.verify.untouched_pipeline import UntouchedPipeline, untouched_pipeline


class Block(nn.Module):
    """Statistics of batches, dropout, a frozen weight, and a buffer that no state dict has."""

    def __init__(self, width=6):
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.2)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("shift", torch.rand(width), persistent=False)

    def forward(self, x):
        return x + self.drop(self.linear(self.norm(x))) + self.shift.to(x.dtype)


class Marked(PipelineModule):
    """A class of the script's own, whose loss is a method that uses its attributes."""

    def __init__(self, layers, stages, **more):
        super().__init__(layers, stages, loss_fn=self.loss, **more)
        self.factor = 0.5
        self.seen = []

    def loss(self, outputs, labels):
        self.seen.append(float(outputs.detach().mean()))
        return self.factor * nn.functional.mse_loss(outputs, labels)

    def get_additional_losses(self):
        return {"mean": torch.tensor(self.seen[-1])}


def blocks(count=4):
    specs = [LayerSpec(Block) for _ in range(count)]
    return [LayerSpec(nn.Linear, 6, 6), torch.tanh, *specs, LayerSpec(nn.Linear, 6, 5)]


def simple():
    return [LayerSpec(nn.Linear, 6, 8), nn.GELU(), LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 5)]


@pytest.fixture(autouse=True)
def verdicts(monkeypatch, tmp_path):
    """What proofs come to with an empty cache: those of all ranks, and reasons for what was not proven."""
    found = []
    prove_as_users_do(monkeypatch, tmp_path)
    pass_on_verdicts(monkeypatch, FirstStepProof, found.append)
    return found


def train(
    world=2,
    stages=2,
    layers=blocks,
    *,
    kind=PipelineModule,
    make=micro_batch,
    config=None,
    own_optimizer=False,
    change=None,
    dtype=None,
    **more,
):
    """Train two steps, and return the weights of the whole model."""
    named = {} if kind is Marked else {"loss_fn": nn.functional.mse_loss}
    named |= {"partition_method": "uniform", **more}

    def program(ranks):
        model = kind(layers(), stages, **named)
        if change is not None:
            change(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2) if own_optimizer else None
        settings = {**pipeline_config(0), **deepcopy(config or {})}
        engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config=settings)
        place = ranks.rank % (world // stages)
        for step in range(2):
            pairs = [make(step, micro, place) for micro in range(4)]
            if dtype is not None:
                pairs = [(inputs.to(dtype), labels.to(dtype)) for inputs, labels in pairs]
            engine.train_batch(iter(pairs))
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return state

    return run_threads(world, program)[0]


TIED = {"layers": tied_layers, "make": words, "loss_fn": nn.functional.cross_entropy}
RIGHT = {
    "chunks, and the script's optimizer": {"own_optimizer": True, "schedule": "interleaved", "chunks": 2},
    "tied, V schedule": {**TIED, "schedule": "zb-v"},
    "tied, data ranks, ZeRO 1": {**TIED, "world": 4, "config": {"zero_optimization": {"stage": 1}}},
    "bfloat16": {"layers": simple, "config": {"bf16": {"enabled": True}}, "dtype": torch.bfloat16},
    "a subclass, recomputation": {"kind": Marked, "layers": simple, "activation_checkpoint_interval": 2},
    "float16": {
        "layers": simple,
        "dtype": torch.float16,
        "config": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    },
    "one stage": {"stages": 1, "layers": simple, "config": {"verify": "always"}},
    "data ranks, ZeRO 2": {"world": 4, "config": {"zero_optimization": {"stage": 2}}},
    "three uneven stages, seeds": {
        "world": 3,
        "stages": 3,
        "layers": lambda: [LayerSpec(nn.Linear, 6, 60), LayerSpec(nn.Linear, 60, 6), *blocks(3)],
        "seed_layers": True,
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_pipeline_is_proven_once(name, verdicts):
    case = RIGHT[name]
    train(**case)
    assert len(verdicts) == case.get("world", 2)
    assert all(not isinstance(one, str) and one.is_proven and one.acted["pipeline"] for one in verdicts), verdicts


def test_rank_0_has_the_buffers_of_all_stages_and_what_they_train():
    config = load_config({**pipeline_config(0), "mesh": {"pipe": 2}})

    def program(ranks):
        model = PipelineModule(blocks(), 2, partition_method="uniform")
        for name, one in model.named_parameters():
            one.requires_grad_(ranks.rank == 0 or "norm" not in name)
        runtime = build(config)
        runtime.enter_groups()
        found, reason = untouched_pipeline(model, config, runtime, 1 << 20)
        small, too_many = untouched_pipeline(model, config, runtime, 10)
        runtime.leave_groups()
        assert small is None
        assert "parameters" in too_many
        of_all = None if found is None else (dict(found.module.named_parameters()), dict(found.module.named_buffers()))
        return dict(model.named_parameters()), dict(model.named_buffers()), of_all, reason

    stages = run_threads(2, program)
    parameters, buffers = stages[0][2]
    assert stages[1][2] is None
    assert {one[3] for one in stages} == {""}
    assert all(one.is_meta for one in parameters.values())
    trained = {name: one.requires_grad for stage in stages for name, one in stage[0].items()}
    assert trained == {name: one.requires_grad for name, one in parameters.items()}
    of_stages = {name: one for stage in stages for name, one in stage[1].items()}
    assert of_stages.keys() == buffers.keys()
    assert all(torch.equal(one, buffers[name]) for name, one in of_stages.items())


def test_a_change_of_any_stage_is_proven_again(verdicts):
    def layers(function=torch.tanh, bias=True):
        return [*simple()[:3], function, LayerSpec(nn.Linear, 8, 5, bias=bias)]

    changed = [
        {"layers": partial(layers, torch.sigmoid)},
        {"layers": partial(layers, bias=False)},
        {"schedule": "gpipe"},
    ]
    compared = []
    for changes in ({}, {}, *changed):
        train(**{"layers": layers, **changes})
        compared.append(len(verdicts) // 2)
    assert compared == [1, 1, 2, 3, 4]


def test_a_sequential_that_the_config_cuts_is_proven(verdicts):
    def program(ranks):
        model = nn.Sequential(*plain_layers())
        model.loss_fn = nn.functional.mse_loss
        engine, *_ = polyaccel.initialize(model=model, config={**pipeline_config(0), "pipeline": {"stages": 2}})
        engine.train_batch(iter([micro_batch(0, micro, 0) for micro in range(4)]))
        engine.destroy()

    run_threads(2, program)
    assert [one.is_proven for one in verdicts] == [True, True]


def test_a_proof_of_stages_leaves_no_trace(monkeypatch, verdicts):
    copies = []
    with_values = UntouchedPipeline.with_values

    def note(*given):
        copied = with_values(*given)
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(UntouchedPipeline, "with_values", note)
    layers = [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 5)]

    def states(choice):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        found = train(layers=partial(deepcopied, layers), config={"verify": choice})
        return found, torch.get_rng_state(), random.getstate(), np.random.get_state()

    def deepcopied(given):
        own = deepcopy(given)
        return [LayerSpec(lambda one=one: one) for one in own]

    off, on = states("off"), states("always")
    assert verdicts[0].is_proven
    assert off[0].keys() == on[0].keys()
    assert all(torch.equal(value, on[0][name]) for name, value in off[0].items())
    assert torch.equal(off[1], on[1])
    assert off[2] == on[2]
    np.testing.assert_equal(off[3], on[3])
    gc.collect()
    assert copies
    assert not any(one() is not None for one in copies)


def with_hook(model):
    """A hook of the last stage alone, whose closure copies would share."""
    seen = []
    if model.stage:
        model._layer_named("6").register_forward_hook(lambda module, inputs, output: seen.append(module))


HEAD = nn.Linear(5, 5)


class Another(nn.Linear):
    made = 0

    def __init__(self, *given):
        super().__init__(*given)
        Another.made += 1
        self.number = Another.made


def wrapped(outputs, labels):
    return (lambda given: HEAD(given).square().mean())(outputs)


class Keeper:
    def __init__(self, module):
        self.module = module

    def loss(self, outputs, labels):
        return self.module(outputs).square().mean()


def closing_over(value):
    return lambda outputs, labels: (value, outputs)


@pytest.mark.parametrize(
    ("function", "is_shared"),
    [
        (wrapped, True),
        (closing_over({"heads": [HEAD]}), True),
        (closing_over(HEAD.weight), True),
        (Keeper(HEAD).loss, True),
        (partial(wrapped, labels=None), True),
        (closing_over(closing_over(HEAD)), True),
        (closing_over(nn.CrossEntropyLoss()), False),
        (closing_over([1.0, "mean", torch.ones(2), torch.float32]), False),
        (partial(nn.functional.linear, weight=HEAD.weight), False),  # which is copied with the model
        (Keeper(nn.Tanh()).loss, False),
        (nn.functional.cross_entropy, False),
    ],
)
def test_functions_that_refer_to_what_trains_are_known(function, is_shared):
    assert (trained_part_of(function, nn.Identity()) is not None) == is_shared


UNPROVEN = {
    "modules that no other stage has kept": {"layers": plain_layers},
    "a loss with parameters": {"loss_fn": lambda outputs, labels: HEAD(outputs).square().mean()},
    "hooks on another stage": {"change": with_hook},
    "layers that are others when they are built again": {"layers": lambda: [LayerSpec(Another, 6, n) for n in (6, 5)]},
    "buffers outside of the layers": {"change": lambda model: model.register_buffer("also", torch.ones(1))},
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_stages_that_cannot_be_proven_train(name, verdicts):
    train(**UNPROVEN[name])
    assert len(verdicts) == 2
    assert isinstance(verdicts[0], str)


def without_sum(monkeypatch):
    take = TiedWeights.take_gradients
    monkeypatch.setattr(
        TiedWeights, "take_gradients", lambda self: [(one, torch.zeros_like(more)) for one, more in take(self)]
    )


def scaled_at_boundary(monkeypatch):
    receive = StageExchange.receive_gradients
    monkeypatch.setattr(StageExchange, "receive_gradients", lambda *given: [1.01 * one for one in receive(*given)])


def counted_twice(monkeypatch):
    run = StageExecutor._run_backward

    def run_twice(self, engine, task, here, ties):
        if here.loss is not None and task.micro_batch == 1:
            here.loss = 2 * here.loss
        run(self, engine, task, here, ties)

    monkeypatch.setattr(StageExecutor, "_run_backward", run_twice)


def swapped(monkeypatch):
    def swap(model):
        with torch.no_grad():
            for name, one in model.named_parameters():
                if name == "5.linear.weight":
                    one.copy_(one.flip(0).clone())

    plant(monkeypatch, PipelineLayers, swap)


def recomputed(function, *inputs):
    return 1.01 * checkpoint(function, *inputs, use_reentrant=False)


WRONG = {
    "a tied gradient that is not summed": (without_sum, TIED, "0.weight"),
    "a gradient that is scaled between stages": (scaled_at_boundary, {}, ""),
    "a micro-batch that counts twice": (counted_twice, {}, ""),
    "a layer of another stage with other values": (swapped, {}, ""),
    "a recomputation that changes numbers": (
        lambda _: None,
        {"activation_checkpoint_interval": 1, "activation_checkpoint_func": recomputed},
        "",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pipeline_stops_before_the_first_update(name, monkeypatch, verdicts):
    spoil, case, parameter = WRONG[name]
    spoil(monkeypatch)
    with pytest.raises(VerificationError) as error:
        train(**case)
    assert {one.blamed for one in verdicts} == {("pipeline",)}
    if parameter:
        assert error.value.value == parameter


def test_a_module_that_two_stages_train_apart_is_an_error(verdicts):
    kept = []

    def layers():
        one = nn.Linear(6, 6)
        kept.append(one)
        return [one, LayerSpec(nn.Linear, 6, 6), one, LayerSpec(nn.Linear, 6, 5)]

    with pytest.raises(VerificationError) as error:
        train(layers=layers)
    assert error.value.value == "0.weight"
