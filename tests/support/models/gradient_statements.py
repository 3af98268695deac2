"""What scripts do to gradients between the backward pass and the update."""

from __future__ import annotations

import torch
from parity_models import ParityModel, Statement
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def halve(model: ParityModel) -> None:
    for gradient in gradients(model):
        gradient.mul_(0.5)


def assign_the_third(model: ParityModel) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / 3


def assign_a_tensor(model: ParityModel) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.linspace(-1.0, 1.0, parameter.numel()).view(parameter.shape)


def drop_one(model: ParityModel) -> None:
    model.wide.weight.grad = None
    del model.narrow.bias.grad


def zero_one(model: ParityModel) -> None:
    if model.wide.weight.grad is not None:
        model.wide.weight.grad.zero_()


def add_a_penalty(model: ParityModel) -> None:
    """A tensor of the parameter's shape is added to a part of it on each rank."""
    if model.wide.weight.grad is not None:
        model.wide.weight.grad.add_(torch.linspace(0.0, 0.1, 198).view(33, 6), alpha=0.5)
    if model.narrow.weight.grad is not None:
        model.narrow.weight.grad.mul_(torch.linspace(0.0, 1.0, 33))  # which broadcasts


def count_the_norm(model: ParityModel) -> None:
    """The total norm as scripts write it by hand."""
    total = sum(gradient.detach().data.norm(2).item() ** 2 for gradient in gradients(model)) ** 0.5
    for gradient in gradients(model):
        gradient.div_(total or 1.0)


def all_at_once(model: ParityModel) -> None:
    clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    if found := gradients(model):  # torch refuses empty lists
        torch._foreach_clamp_max_(found, 0.01)


def clip_values(model: ParityModel) -> None:
    if gradients(model):  # likewise
        clip_grad_value_(model.parameters(), 0.01)


STATEMENTS: dict[str, Statement] = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_norm_(norm_type=inf)": lambda model: clip_grad_norm_(model.parameters(), 0.02, norm_type=float("inf")),
    "clip_grad_norm_(norm_type=1)": lambda model: clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
    "clip_grad_value_": clip_values,
    "p.grad.mul_(.5)": halve,
    "p.grad = p.grad / 3": assign_the_third,
    "p.grad = tensor": assign_a_tensor,
    "p.grad = None": drop_one,
    "p.grad.zero_()": zero_one,
    "p.grad.add_(tensor)": add_a_penalty,
    "p.grad.norm()": count_the_norm,
    "clip_grad_norm_(foreach=True), torch._foreach_clamp_max_": all_at_once,
    "model.zero_grad()": lambda model: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model: model.zero_grad(set_to_none=False),
}
