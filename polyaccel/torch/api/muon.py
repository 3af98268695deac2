"""Muon for matrices, with AdamW for all else: the optimizer that a config calls "Muon".

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the update of a matrix by the nearest
matrix with equal singular values, nearly. A Newton-Schulz iteration finds it: X <- aX + b(XX')X + c(XX')(XX')X, begun
at the momentum divided by its norm. DeepSpeed's keys and its rule for what is a matrix of Muon's are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from polyaccel.errors import ConfigError, Problem

MUON = "Muon"
"""What a config calls it."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the quintic: of all that keep singular values near 1, those with the largest slope at 0."""
_EPS = 1e-7
_MUON_KEYS = ("lr", "momentum", "weight_decay", "nesterov", "ns_steps")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
_OF_ADAM = ("embed", "lm_head")
"""Parts of names of matrices that AdamW updates."""


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return the orthogonal factor of matrices, nearly, computed in `dtype`. The first dimensions count them."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(dtype)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if is_tall else x
    return found


class Muon(torch.optim.Optimizer):
    """Groups with `use_muon` get Muon, with lr, momentum, weight_decay, nesterov and ns_steps; the others AdamW, with
    lr, betas, eps and weight_decay. A filter of a convolution is the matrix of its first dimension and the rest.

    The iteration runs in float32 on the CPU and in bfloat16 elsewhere.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            members = [each for each in group["params"] if each.grad is not None]
            if group["use_muon"]:
                for each in members:
                    self._move(each, group)
            elif members:
                self._move_by_adam(members, group)
        return loss

    def _move(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None  # the caller's condition
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        wanted = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        wanted = wanted.flatten(1) if wanted.dim() == 4 else wanted
        dtype = wanted.dtype if wanted.dtype is torch.float64 else torch.float32
        dtype = dtype if wanted.device.type == "cpu" else torch.bfloat16
        update = orthogonalize(wanted, group["ns_steps"], dtype)
        scale = sqrt(max(1.0, grad.size(-2) / grad.size(-1)))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.reshape(parameter.shape).to(parameter.dtype), alpha=-group["lr"] * scale)

    def _move_by_adam(self, members: list[Tensor], group: Mapping[str, Any]) -> None:
        for each in members:
            state = self.state[each]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(each), torch.zeros_like(each)
        states = [self.state[each] for each in members]
        beta1, beta2 = group["betas"]
        adamw(
            members,
            [each.grad for each in members if each.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def muon_of(
    params: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], model: nn.Module, *, keeps_empty: bool = False
) -> tuple[Muon, frozenset[str]]:
    """Return the config's Muon over `groups` of the parameters of `model`, and the names of Muon's matrices.

    A parameter with an attribute `use_muon` says itself whose it is, and so does a group with that key. Else Muon gets
    what has two dimensions or more, unless its name has "embed" or "lm_head". A group is cut in two where it has both
    kinds, and with `keeps_empty` always, so that the stages of a pipeline have equal groups. Settings of a group go
    before those of the config. Raises ConfigError for a vector of Muon's.
    """
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    rates = {True: params["muon_lr"], False: params["adam_lr"]}
    defaults = {True: 0.02, False: 3e-4}
    halves: list[dict[str, Any]] = []
    matrices: set[str] = set()
    for group in groups:
        for use_muon, keys in ((True, _MUON_KEYS), (False, _ADAM_KEYS)):
            members = [each for each in group["params"] if _is_muons(each, names.get(each, ""), group) is use_muon]
            if not members and not keeps_empty:
                continue
            settings = {key: params[key] for key in keys}
            rate = rates[use_muon] if rates[use_muon] is not None else params["lr"]
            settings["lr"] = defaults[use_muon] if rate is None else rate
            settings |= {key: value for key, value in group.items() if key != "params"}
            halves.append({**settings, "params": members, "use_muon": use_muon})
            if use_muon:
                _check_matrices(members, names)
                matrices |= {names[each] for each in members if each in names}
    return Muon(halves), frozenset(matrices)


def _is_muons(parameter: nn.Parameter, fqn: str, group: Mapping[str, Any]) -> bool:
    chosen = group.get("use_muon", getattr(parameter, "use_muon", None))
    if chosen is not None:
        return bool(chosen)
    return parameter.dim() >= 2 and not any(part in fqn.lower() for part in _OF_ADAM)


def _check_matrices(members: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    for each in members:
        if each.dim() < 2:
            fqn = names.get(each, "a parameter")
            expected = f"{fqn} has use_muon and {each.dim()} dimensions, and Muon updates matrices"
            raise ConfigError([Problem("optimizer.type", MUON, expected, "set use_muon = False on it")])
