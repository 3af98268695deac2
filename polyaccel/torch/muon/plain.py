"""Muon as an optimizer of torch, one parameter after the other: what the sharded one is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from polyaccel.engine.policies.muon import ROW_AVERAGE
from polyaccel.torch.muon.groups import MuonGroups
from polyaccel.torch.muon.matrices import matrices_of, rule_of
from polyaccel.torch.muon.newton_schulz import orthogonalize, update_dtype
from polyaccel.torch.muon.normuon import scale_rows


class Muon(torch.optim.Optimizer):
    """Groups with `use_muon` get Muon, with lr, momentum, weight_decay, nesterov and ns_steps; the others AdamW, with
    lr, betas, eps and weight_decay."""

    def __init__(self, found: MuonGroups) -> None:
        self._heads: Mapping[Tensor, int] = dict[Tensor, int](found.heads.items())
        super().__init__(found.groups, {})

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

    def _move(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None  # the caller's condition
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        wanted = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        own = matrices_of(parameter.shape, self._heads.get(parameter, 0))
        dtype = update_dtype(wanted.device, wanted.dtype, group.get("ns_dtype"))
        each = wanted.reshape(own.count, own.rows, own.columns)
        update = orthogonalize(each, group["ns_steps"], dtype, group["ns_method"])
        if (beta := group.get("normuon_beta")) is not None:
            if ROW_AVERAGE not in state:
                state[ROW_AVERAGE] = torch.zeros_like(parameter)
            update = scale_rows(update, state[ROW_AVERAGE].view_as(each), beta)
        scale = own.scale(rule_of(group))
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
