"""`Schedule`: the base of the learning-rate schedules that a config can name. See [Note: Learning rate of the first
steps]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from polyaccel.engine.policies.schedules import NAMES, schedule_arguments
from polyaccel.errors import CheckpointError, ConfigError, Problem


class HasParamGroups(Protocol):
    """The part of an optimizer that a schedule needs: groups with an `lr`, and perhaps `betas` or `momentum`."""

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]: ...


class Schedule(ABC):
    """Sets the learning rate of every group as a function of `last_batch_iteration`, the last finished optimizer step.

    Construction at -1 sets the first values; at any other iteration it leaves the groups alone until the next `step`,
    since they come out of a checkpoint. The config's models check the arguments of subclasses, see
    `schedule_arguments`; only what depends on the optimizer's groups is checked here.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int) -> None:
        if last_batch_iteration < -1:
            key, expected = "scheduler.params.last_batch_iteration", "should be at least -1"
            raise ConfigError([Problem(key, last_batch_iteration, expected)])
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    @abstractmethod
    def lrs_at(self, iteration: int) -> list[float]:
        """The learning rate of each group at `iteration` >= -1."""

    def momenta_at(self, iteration: int) -> list[float] | None:
        """The momentum (first beta) of each group at `iteration`, or None where the schedule leaves it alone."""
        return None

    def get_lr(self) -> list[float]:
        """The learning rates of the present iteration, computed again."""
        return self.lrs_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rates that the groups have now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and set the groups."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, and set the groups."""
        iteration = state_dict.get("last_batch_iteration")
        if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < -1:
            raise CheckpointError(
                f"no last_batch_iteration in the saved state {dict(state_dict)!r} of a learning-rate schedule",
                hint=f"load what {type(self).__name__}.state_dict() gave",
                value=iteration,
            )
        self.last_batch_iteration = iteration
        self._apply()

    def _apply(self) -> None:
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.lrs_at(self.last_batch_iteration), strict=True):
            if hasattr(group["lr"], "fill_"):  # a tensor, to which the caller may refer
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._set_momenta(self.momenta_at(self.last_batch_iteration) or ())

    def _set_momenta(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif group.get("momentum"):
                group["momentum"] = momentum


def check_arguments(schedule: Schedule, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked `arguments` of a constructor, which gives its `locals()`. Raises as `schedule_arguments`."""
    others = ("self", "__class__", "optimizer", "last_batch_iteration")
    own = {name: value for name, value in arguments.items() if name not in others}
    return schedule_arguments(next(kind.__name__ for kind in type(schedule).__mro__ if kind.__name__ in NAMES), own)
