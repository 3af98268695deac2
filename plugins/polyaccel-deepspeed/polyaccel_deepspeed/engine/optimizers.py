"""DeepSpeed's optimizers: torch optimizers in every respect, whose numbers polyaccel keeps in its own slices.

Given to `deepspeed.initialize`, one becomes the optimizer of that name in the config, with its groups; it then shows
the engine's groups, so that a schedule which holds it moves the engine's learning rates. Alone it does not step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from polyaccel.errors import PolyaccelError


class NamedOptimizer(torch.optim.Optimizer):
    """An optimizer of the config's, as an object: `kind` is its name there."""

    kind: ClassVar[str]

    def section(self) -> dict[str, Any]:
        """The config's section `optimizer` that means this one."""
        return {"type": self.kind, "params": dict(self.defaults)}

    def follow(self, engines: torch.optim.Optimizer) -> None:
        """Show the engine's groups from now on, in the very dicts that there were: schedules, and optimizers that this
        one was made of, hold them."""
        for index, group in enumerate(engines.param_groups):
            self.param_groups[index].update(group)
            engines.param_groups[index] = self.param_groups[index]
        self.param_groups = engines.param_groups
        self._opt_called = True  # by which schedules of torch see that an update comes before their first step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises PolyaccelError: the engine's optimizer has the numbers."""
        name = type(self).__name__
        raise PolyaccelError(
            f"{name}.step was called, but its numbers are in an engine",
            hint=f"pass {name} to deepspeed.initialize, and call engine.step()",
        )


class FusedAdam(NamedOptimizer):
    """Adam, or with `adam_w_mode` AdamW."""

    kind = "Adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse(amsgrad=amsgrad)
        super().__init__(params, _adam(lr, bias_correction, betas, eps, weight_decay, adam_w_mode))


class DeepSpeedCPUAdam(NamedOptimizer):
    """Adam, or with `adamw_mode` AdamW."""

    kind = "Adam"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse(amsgrad=amsgrad, fp32_optimizer_states=not fp32_optimizer_states)
        super().__init__(model_params, _adam(lr, bias_correction, betas, eps, weight_decay, adamw_mode))


class DeepSpeedCPUAdagrad(NamedOptimizer):
    """Adagrad."""

    kind = "Adagrad"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse(amsgrad=amsgrad, fp32_optimizer_states=not fp32_optimizer_states)
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})


class DeepSpeedCPULion(NamedOptimizer):
    """Lion."""

    kind = "Lion"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse(fp32_optimizer_states=not fp32_optimizer_states)
        super().__init__(model_params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})


class FusedLion(NamedOptimizer):
    """Lion."""

    kind = "Lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})


class FusedLamb(NamedOptimizer):
    """LAMB."""

    kind = "Lamb"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _refuse(amsgrad=amsgrad, eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=bool(max_grad_norm))
        options = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, options)


def _adam(
    lr: float, bias_correction: bool, betas: Any, eps: float, weight_decay: float, decoupled: bool
) -> dict[str, Any]:
    return {
        "lr": float(lr),
        "bias_correction": bias_correction,
        "betas": tuple(betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "adam_w_mode": decoupled,
    }


def _refuse(**asked: bool) -> None:
    for name, is_asked in asked.items():
        if is_asked:
            raise PolyaccelError(f"{name} is not available", hint=f"leave {name} out", value=name)
