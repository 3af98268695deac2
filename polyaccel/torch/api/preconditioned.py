"""Shampoo and SOAP: updates of matrices between preconditioners of their rows and columns.

Shampoo (Gupta et al. 2018, arXiv 1802.09568, algorithm 1): L += GG', R += G'G, and W -= lr L^(-1/4) G R^(-1/4).
SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3): AdamW in the eigenvectors of the averages of GG' and G'G, which
one power iteration with a QR decomposition follows every `precondition_frequency` updates. As in the authors' code the
first gradient begins the averages and moves nothing.

A convolution's filter is the matrix of its first dimension and the rest. A side longer than `max_precond_dim` has no
preconditioner. What has one dimension or none gets Adagrad under Shampoo, and AdamW under SOAP.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor


class _OnMatrices(torch.optim.Optimizer):
    """Steps over parameters one by one, each as a matrix or a vector."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                flat = grad.flatten(1) if grad.dim() > 2 else grad
                step = self._step_of(self.state[parameter], flat, group)
                if step is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(step.reshape(parameter.shape), alpha=-group["lr"])
        return loss

    @abstractmethod
    def _step_of(self, state: dict[str, Any], grad: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        """Return what the learning rate multiplies; None moves nothing."""


class Shampoo(_OnMatrices):
    """Groups have lr, momentum, weight_decay, eps, precondition_frequency and max_precond_dim."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-4,
        precondition_frequency: int = 1,
        max_precond_dim: int = 10_000,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps}
        defaults |= {"precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim}
        super().__init__(params, defaults)

    def _step_of(self, state: dict[str, Any], grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        step = grad
        if grad.dim() < 2:
            squares = state.setdefault("sum", torch.full_like(grad, group["eps"]))
            squares.add_(grad.square())
            step = grad / squares.sqrt()
        else:
            count = state.setdefault("step", torch.tensor(0.0))
            sides = [side for side in (0, 1) if grad.shape[side] <= group["max_precond_dim"]]
            for side in sides:
                name = ("left", "right")[side]
                one = torch.eye(grad.shape[side], dtype=grad.dtype, device=grad.device)
                total = state.setdefault(name, one * group["eps"])
                total.add_(grad @ grad.T if side == 0 else grad.T @ grad)
                if int(count) % group["precondition_frequency"] == 0:
                    state[f"{name}_root"] = inverse_root(total, 2 * len(sides))
                root = state[f"{name}_root"]
                step = root @ step if side == 0 else step @ root
            count.add_(1)
        if group["momentum"]:
            average = state.setdefault("momentum_buffer", torch.zeros_like(step))
            step = average.mul_(group["momentum"]).add_(step).clone()
        return step


def inverse_root(matrix: Tensor, order: int) -> Tensor:
    """Return a symmetric positive matrix to the power of -1 / `order`, by its eigenvalues in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    floor = values[-1].clamp(min=1e-300) * 1e-16
    root: Tensor = (vectors * values.clamp(min=floor) ** (-1 / order)) @ vectors.T
    return root.to(matrix.dtype)


class Soap(_OnMatrices):
    """Groups have lr, betas, shampoo_beta, eps, weight_decay, precondition_frequency and max_precond_dim."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10_000,
    ) -> None:
        decay = betas[1] if shampoo_beta is None else shampoo_beta
        defaults = {"lr": lr, "betas": tuple(betas), "shampoo_beta": decay, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim}
        super().__init__(params, defaults)

    def _step_of(self, state: dict[str, Any], grad: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            if grad.dim() >= 2:
                self._learn(state, grad, group)
            return None
        beta1, beta2 = group["betas"]
        state["step"] += 1
        count = float(state["step"])
        rotated = _rotated(state, grad)
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        average.lerp_(grad, 1 - beta1)
        squares.lerp_(rotated.square(), 1 - beta2)
        found: Tensor = _rotated(state, average) / (squares.sqrt() + group["eps"])
        found = _rotated(state, found, back=True) * (sqrt(1 - beta2**count) / (1 - beta1**count))
        if grad.dim() >= 2:
            self._learn(state, grad, group)
        return found

    def _learn(self, state: dict[str, Any], grad: Tensor, group: Mapping[str, Any]) -> None:
        """Average the products of a gradient, and follow their eigenvectors."""
        is_due = int(state["step"]) % group["precondition_frequency"] == 0
        for side in (0, 1):
            if grad.shape[side] > group["max_precond_dim"]:
                continue
            name, product = ("left", "right")[side], grad @ grad.T if side == 0 else grad.T @ grad
            average = state.setdefault(name, torch.zeros_like(product))
            average.lerp_(product, 1 - group["shampoo_beta"])
            if f"{name}_basis" not in state:
                one = torch.eye(len(average), dtype=average.dtype, device=average.device)
                state[f"{name}_basis"] = torch.linalg.eigh(average + 1e-30 * one)[1].flip(1)
            elif is_due:
                basis = state[f"{name}_basis"]
                order = (basis * (average @ basis)).sum(0).argsort(descending=True)
                state["exp_avg_sq"] = state["exp_avg_sq"].index_select(side, order)
                state[f"{name}_basis"] = torch.linalg.qr(average @ basis[:, order])[0]


def _rotated(state: Mapping[str, Any], values: Tensor, *, back: bool = False) -> Tensor:
    """Return values in the bases of a state, or from there `back`."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is not None:
        values = (left if back else left.T) @ values
    if right is not None:
        values = values @ (right.T if back else right)
    return values
