"""Optimizers of users' own: elementwise ones, some that look at whole parameters, and some that look at several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
