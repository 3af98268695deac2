"""The `optimizer` that torch users hold: groups whose learning rates they and their schedules change, and a `step`.

The numbers live in the ZeRO step's slices. `ZeroOptimizer` is a `torch.optim.Optimizer` so that every scheduler accepts
it; its `param_groups` are read again at each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from polyaccel.engine.groups import hyperparameters, load_groups
from polyaccel.engine.lr_schedules import SCHEDULES
from polyaccel.errors import ConfigError, PolyaccelError, Problem, ShardingError
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.torch.api.whole_optimizers import WHOLE_OPTIMIZERS

ParamGroups = list[dict[str, Any]]


def make_groups(parameters: Iterable[Any] | None, module: nn.Module, defaults: Mapping[str, Any]) -> ParamGroups:
    """Return optimizer groups from parameters, groups, or None for all; frozen ones are members too."""
    given = list(parameters) if parameters is not None else list(module.parameters())
    groups = [dict(entry) for entry in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        group["params"] = members
        for key, value in defaults.items():
            group.setdefault(key, value)
    return groups


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class of `WHOLE_OPTIMIZERS` or torch.optim called `name`. Raises ConfigError when there is none."""
    kind = WHOLE_OPTIMIZERS.get(name) or getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer):
        hint = f"use one of {', '.join((*OPTIMIZERS, *WHOLE_OPTIMIZERS))}, or the exact name of a class of torch.optim"
        raise ConfigError([Problem("optimizer.type", name, "no optimizer has this name", hint)])
    return kind


def schedule_class(name: str) -> Callable[..., torch.optim.lr_scheduler.LRScheduler]:
    """The class of torch.optim.lr_scheduler called `name`. Raises ConfigError when there is none."""
    kind = getattr(torch.optim.lr_scheduler, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)):
        hint = f"use one of {', '.join(SCHEDULES)}, or the exact name of a class of torch.optim.lr_scheduler"
        raise ConfigError([Problem("scheduler.type", name, "no schedule has this name", hint)])
    return kind


def torch_optimizer(name: str, params: Mapping[str, Any], groups: ParamGroups) -> torch.optim.Optimizer:
    """An optimizer of torch by its exact class name. Raises ConfigError when torch has none, or refuses `params`."""
    kind = optimizer_class(name)
    try:
        return kind(groups, **params)
    except (TypeError, ValueError) as error:
        hint = f"see torch.optim.{name}"
        raise ConfigError([Problem("optimizer.params", dict(params), f"{name} refuses them: {error}", hint)]) from error


class ZeroOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as torch sees it.

    `param_groups` hold the module's parameters and the hyperparameters; `step` is the engine's update, without the
    bookkeeping of `engine.step()`, and `zero_grad` forgets the gradients in the buckets. Its state is sharded, so
    `state_dict` has the groups only: the engine's checkpoint has the rest.
    """

    def __init__(
        self,
        groups: ParamGroups,
        update: Callable[[Callable[[], Any] | None], Any],
        discard_gradients: Callable[[], None],
        *,
        evaluates: bool = False,
    ) -> None:
        # The base class refuses an empty list of groups; give it the fields that it promises to schedulers and leave
        # the rest to the slices.
        self._update = update
        self._discard_gradients = discard_gradients
        self._evaluates = evaluates
        self._is_built = False
        super().__init__([{"params": [nn.Parameter(torch.empty(0))]}], {})
        self._is_built = True
        self.param_groups = groups
        self._members = self._addresses()
        self.defaults = hyperparameters(groups[0]) if groups else {}  # where schedules look what there is to move

    def _addresses(self) -> list[list[int]]:
        """The parameters of each group; the engine keeps them alive."""
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _require_members(self) -> None:
        """Raise ShardingError where the groups have other parameters than when the engine was built."""
        now = self._addresses()
        if now != self._members:
            pairs = zip_longest(now, self._members)
            index = next(index for index, (ours, planned) in enumerate(pairs) if ours != planned)
            raise ShardingError(
                f"optimizer group {index} has other parameters than the engine was built with",
                hint="pass all groups to polyaccel.initialize, or call it again; lr 0 keeps a group still until it is "
                "wanted",
                value=index,
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; return the result of `closure`, which computes loss and gradients first."""
        self._require_members()
        if self._evaluates:
            if closure is None:
                raise PolyaccelError(
                    "this optimizer evaluates the loss several times a step, and was given no closure that computes it",
                    hint="call engine.optimizer.step(closure) instead of engine.step(); the closure calls "
                    "engine.zero_grad(), runs the model, calls engine.backward(loss) and returns the loss",
                )
            return self._update(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(None)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch's `GradScaler.step`, which would find the overflows of this rank only."""
        raise PolyaccelError(
            "torch's GradScaler was asked to step an engine's optimizer",
            hint='use "fp16": {"enabled": true} or "bf16" in the config, then engine.backward(loss) and engine.step(): '
            "the engine scales losses itself, and all ranks agree on overflows; GradScaler(enabled=False) is fine",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ShardingError: parameters are laid out. Also avoids the base class's slow imports."""
        if self._is_built:
            raise ShardingError(
                "a group of parameters was added to an engine's optimizer, which would not train it",
                hint="pass all groups to polyaccel.initialize; lr 0 keeps one still until it is wanted",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of earlier micro-batches too; `set_to_none=False` makes them zeros."""
        if set_to_none:
            self._discard_gradients()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The hyperparameters of the groups."""
        return {"param_groups": [hyperparameters(group) for group in self.param_groups]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        load_groups(self.param_groups, state_dict["param_groups"])
