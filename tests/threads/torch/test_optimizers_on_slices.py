"""Client optimizers that look at more than an element are refused where ZeRO cuts parameters, whatever the config says.

Others are taken, and the trial that decides it changes nothing.
"""

from __future__ import annotations

import copy
import logging
import random

import numpy as np
import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.api.optimizer_proof import try_on_slices

TORCH = torch.optim


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200, 6)
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 5)
        self.norm = nn.LayerNorm(9)
        self.mix = nn.Conv1d(1, 2, 3)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.first(x + self.table.weight[:1]))) * self.gain
        return self.mix(self.second(hidden).unsqueeze(1)).square().mean()


def grouped(model):
    """Two groups of unlike hyperparameters."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() <= 1], "lr": 3e-3},
    ]


class Own(TORCH.Optimizer):
    """An optimizer of the user's: `move` one parameter of a group."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.move(group, index, parameter)

    def move(self, group, index, parameter):
        raise NotImplementedError


class Sign(Own):
    def move(self, group, index, parameter):
        parameter.add_(parameter.grad.sign() + group["weight_decay"] * parameter, alpha=-group["lr"])


class CountedMomentum(Own):
    """Elementwise, with a state of one number, of its own name, and switches at steps."""

    def move(self, group, index, parameter):
        state = self.state[parameter]
        state["updates"] = state.get("updates", 0) + 1
        state["average"] = state.get("average", torch.zeros_like(parameter)).lerp(parameter.grad, 0.3)
        parameter.add_(state["average"], alpha=-group["lr"] / state["updates"] ** 0.5)


class TinyRate(Own):
    """Elementwise, with steps that float32 weights would hide."""

    def move(self, group, index, parameter):
        parameter.add_(parameter.grad, alpha=-1e-9)


class Subclass(TORCH.AdamW):
    """A known one by another name."""


class Lars(Own):
    def move(self, group, index, parameter):
        ratio = float(parameter.norm() / (parameter.grad.norm() + 1e-9))
        parameter.add_(parameter.grad, alpha=-group["lr"] * ratio)


class ClipsByTensor(Own):
    """Clips by the root mean square of a tensor's gradient, with steps that weights hide."""

    def move(self, group, index, parameter):
        rms = float(parameter.grad.square().mean().sqrt())
        parameter.add_(parameter.grad, alpha=-1e-9 / max(1.0, rms))


class GlobalNorm(TORCH.SGD):
    """Its update needs the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        given = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in given]).norm()
        for each in given:
            each.add_(each.grad / (norm + 1.0), alpha=-1e-2)


class Centred(Own):
    def move(self, group, index, parameter):
        mean = parameter.grad.mean(-1, keepdim=True) if parameter.dim() > 1 else 0.0
        parameter.add_(parameter.grad - mean, alpha=-group["lr"])


class DecaysMatrices(Own):
    """Looks at the number of dimensions alone."""

    def move(self, group, index, parameter):
        decay = 0.5 if parameter.dim() > 1 else 0.0
        parameter.add_(parameter.grad + decay * parameter, alpha=-group["lr"])


class ByLength(Own):
    def move(self, group, index, parameter):
        parameter.add_(parameter.grad, alpha=-group["lr"] / (parameter.shape[0] if parameter.dim() else 1))


class ByIndex(Own):
    """Rates by a parameter's place in its group, where a rank has not all parameters."""

    def move(self, group, index, parameter):
        parameter.add_(parameter.grad, alpha=-group["lr"] * (index + 1))


class ByTag(Own):
    """Rates by an attribute of the parameter, which slices have not."""

    def move(self, group, index, parameter):
        parameter.add_(parameter.grad, alpha=-group["lr"] * getattr(parameter, "rate", 1.0))


class Shampoo(Own):
    def move(self, group, index, parameter):
        found = parameter.grad
        if parameter.dim() == 2:
            state = self.state[parameter]
            like = torch.eye(parameter.shape[0], dtype=parameter.dtype)
            state["left"] = state.get("left", 1e-3 * like) + found @ found.T
            values, vectors = torch.linalg.eigh(state["left"])
            found = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.5) @ vectors.T @ found
        parameter.add_(found, alpha=-group["lr"])


class LateNorm(Own):
    """Elementwise but for every tenth step."""

    def move(self, group, index, parameter):
        state = self.state[parameter]
        state["updates"] = state.get("updates", 0) + 1
        scale = float(parameter.grad.norm()) if state["updates"] % 10 == 0 else 1.0
        parameter.add_(parameter.grad, alpha=-group["lr"] * scale)


class StepsItsModel(Own):
    """Steps parameters that it holds itself, and those of its groups never."""

    def __init__(self, params):
        super().__init__(params)
        self.own = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for each in self.own:
            if each.grad is not None:
                each.add_(each.grad, alpha=-1e-2)


class Noisy(Own):
    def move(self, group, index, parameter):
        parameter.add_(parameter.grad + torch.randn_like(parameter), alpha=-group["lr"])


def matrices_of(model):
    return [each for each in model.parameters() if each.dim() == 2]


def huggingface_adafactor(model):
    transformers = pytest.importorskip("transformers")
    return transformers.Adafactor(grouped(model), scale_parameter=False, relative_step=False, lr=1e-3)


def tagged(model):
    for at, each in enumerate(model.parameters()):
        each.rate = 1.0 + at
    return ByTag(grouped(model))


def at_the_begin_of_a_warmup(model):
    optimizer = Lars(grouped(model), lr=0.1)
    TORCH.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    return optimizer


def with_a_past(model):
    """An Adafactor that has stepped: its states are of rows and columns."""
    optimizer = TORCH.Adafactor(grouped(model), lr=1e-2)
    model(torch.ones(2, 6)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


WHOLE = {
    "Adafactor": lambda model: TORCH.Adafactor(grouped(model), lr=1e-2),
    "Adafactor, foreach": lambda model: TORCH.Adafactor(grouped(model), lr=1e-2, foreach=True),
    "Adafactor with a past": with_a_past,
    "Adafactor of transformers": huggingface_adafactor,
    "Lars": lambda model: Lars(grouped(model)),
    "Lars at a rate of 0": at_the_begin_of_a_warmup,
    "ByTag": tagged,
} | {
    kind.__name__: lambda model, kind=kind: kind(grouped(model))
    for kind in (ClipsByTensor, Centred, DecaysMatrices, ByLength, Shampoo, LateNorm)
}
"""They look at whole parameters, one at a time: see `test_whole_parameters`."""
REFUSED = {
    kind.__name__: lambda model, kind=kind: kind(grouped(model)) for kind in (GlobalNorm, ByIndex, StepsItsModel)
}
"""They look at several."""


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 1)])
def test_an_optimizer_that_needs_all_parameters_is_refused_whatever_the_config_says(name, stage, world):
    kinds = []

    def go(_):
        torch.manual_seed(0)
        optimizer = REFUSED[name](model := Net())
        kinds.append(type(optimizer).__name__)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        with pytest.raises(ShardingError) as caught:
            polyaccel.initialize(model=model, optimizer=optimizer, config=config)
        assert caught.value.value == kinds[0]
        assert '"stage": 0' in caught.value.hint

    run_threads(world, go)


@pytest.mark.parametrize("name", [name for name in WHOLE | REFUSED if name != "StepsItsModel"])
def test_stage_0_has_whole_parameters(name):
    """Numbers of plain torch."""

    def train(model, optimizer, engine=None):
        for step in range(3):
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
            if engine is None:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            else:
                engine.backward(engine(x))
                engine.step()
        return [each.detach().clone() for each in model.parameters()]

    def go(_):
        torch.manual_seed(0)
        model = Net()
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
        engine, *_ = polyaccel.initialize(model=model, optimizer=(WHOLE | REFUSED)[name](model), config=config)
        found = train(model, None, engine)
        engine.destroy()
        return found

    torch.manual_seed(0)
    plain = Net()
    wanted = train(plain, (WHOLE | REFUSED)[name](plain))
    for one, other in zip(run_threads(1, go)[0], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


ELEMENTWISE = {
    f"{kind.__name__} {arguments or ''}".strip(): lambda model, kind=kind, arguments=arguments: kind(
        grouped(model), lr=1e-2, **arguments
    )
    for kind, each in {
        TORCH.Adadelta: ({}, {"foreach": True}, {"maximize": True}),
        TORCH.Adagrad: ({}, {"foreach": True}, {"fused": True}, {"initial_accumulator_value": 0.1}),
        TORCH.Adam: ({}, {"foreach": True}, {"fused": True}, {"amsgrad": True}),
        TORCH.AdamW: ({}, {"foreach": True}, {"fused": True}, {"maximize": True}),
        TORCH.Adamax: ({}, {"foreach": True}),
        TORCH.ASGD: ({}, {"foreach": True}),
        TORCH.NAdam: ({}, {"foreach": True}, {"decoupled_weight_decay": True}),
        TORCH.RAdam: ({}, {"foreach": True}),
        TORCH.RMSprop: ({}, {"foreach": True}, {"momentum": 0.9, "centered": True}),
        TORCH.Rprop: ({}, {"foreach": True}),
        TORCH.SGD: ({}, {"foreach": True}, {"fused": True}, {"momentum": 0.9, "nesterov": True}),
    }.items()
    for arguments in each
} | {
    kind.__name__: lambda model, kind=kind: kind(grouped(model)) for kind in (Sign, CountedMomentum, TinyRate, Subclass)
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_trial_knows_elementwise_optimizers_and_changes_nothing(name):
    """With a past of its own too: its states are cut along."""
    torch.manual_seed(0)
    model = Net()
    optimizer = ELEMENTWISE[name](model)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    TORCH.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for past in range(2):
        before = [each.detach().clone() for each in model.parameters()]
        states = repr(optimizer.state_dict())
        seeds = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        assert try_on_slices(optimizer) == type(try_on_slices(optimizer))()
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        assert repr(optimizer.state_dict()) == states
        assert torch.equal(torch.get_rng_state(), seeds[0])
        assert (random.getstate(), repr(np.random.get_state())) == seeds[1:]
        assert len(called) == past
        model(torch.ones(2, 6)).backward()
        optimizer.step()


class Unique(Sign):
    """It cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("there is one")

    def __init__(self, params):
        super().__init__(params)
        self.lock = __import__("threading").Lock()


@pytest.mark.parametrize("kind", [Noisy, Unique], ids=["it draws", "it cannot be copied"])
def test_what_cannot_be_tried_is_taken_at_its_user_s_word_with_a_warning(kind, caplog):
    def go(_):
        model = Net()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        }
        polyaccel.initialize(model=model, optimizer=kind(grouped(model)), config=config)[0].destroy()

    with caplog.at_level(logging.WARNING, logger="polyaccel"):
        run_threads(1, go)
    assert [record.args[0] for record in caplog.records if record.args] == [kind.__name__]


def test_a_trained_element_follows_its_own_gradient_alone():
    """The engine's numbers for what the trial found elementwise are those of plain torch."""

    def inputs(step, rank):
        return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))

    torch.manual_seed(0)
    plain = Net()
    models = [copy.deepcopy(plain) for _ in range(3)]  # here, for ranks that are threads have one generator

    def go(ranks):
        model = models[ranks.rank]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        }
        engine, *_ = polyaccel.initialize(model=model, optimizer=CountedMomentum(grouped(model)), config=config)
        for step in range(3):
            engine.backward(engine(inputs(step, ranks.rank)))
            engine.step()
        found = [each.detach().clone() for each in model.parameters()]
        engine.destroy()
        return found

    optimizer = CountedMomentum(grouped(plain))
    for step in range(3):
        optimizer.zero_grad()
        (sum(plain(inputs(step, rank)) for rank in range(3)) / 3).backward()
        optimizer.step()
    for found in run_threads(3, go):
        for one, other in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
