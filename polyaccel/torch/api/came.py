"""CAME: Adafactor's factored second moments, guided by confidence (Luo et al. 2023, arXiv 2307.02047, algorithm 2).

As the authors' package came_pytorch computes it: the residual between an update and its average is factored like the
second moment, and divides the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def factored_rsqrt(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the inverse root of the matrix that means over its rows and columns stand for (Shazeer & Stern 2018)."""
    of_rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
    return of_rows * columns.unsqueeze(-2).rsqrt()


class Came(torch.optim.Optimizer):
    """Groups have lr, betas (three), eps (two), clip_threshold and weight_decay."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"clip_threshold": clip_threshold, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": tuple(eps), **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        beta1, beta2, beta3 = group["betas"]
        state, is_matrix = self.state[parameter], grad.dim() >= 2
        if not state:
            state["exp_avg"] = torch.zeros_like(grad)
            for name in ("exp_avg_sq", "exp_avg_res") if is_matrix else ():
                state[f"{name}_row"] = grad.new_zeros(grad.shape[:-1])
                state[f"{name}_col"] = grad.new_zeros(grad.shape[:-2] + grad.shape[-1:])
            if not is_matrix:
                state["exp_avg_sq"] = torch.zeros_like(grad)
        update = grad * _rsqrt(state, "exp_avg_sq", grad.square() + group["eps"][0], beta2)
        update /= (_rms(update) / group["clip_threshold"]).clamp(min=1.0)
        average = state["exp_avg"]
        average.lerp_(update, 1 - beta1)
        step = average
        if is_matrix:
            step = average * _rsqrt(state, "exp_avg_res", (update - average).square() + group["eps"][1], beta3)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(step, alpha=-group["lr"])


def _rsqrt(state: dict[str, Tensor], name: str, squares: Tensor, beta: float) -> Tensor:
    """Average squares in a state, by rows and columns where there are any; return their inverse roots."""
    if name in state:
        return state[name].lerp_(squares, 1 - beta).rsqrt()
    state[f"{name}_row"].lerp_(squares.mean(dim=-1), 1 - beta)
    state[f"{name}_col"].lerp_(squares.mean(dim=-2), 1 - beta)
    return factored_rsqrt(state[f"{name}_row"], state[f"{name}_col"])


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
