"""`optimizer.state` of an engine: this rank's part of what the optimizer keeps of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from polyaccel.torch.api.fragments import local_optimizer_state, set_local_optimizer_state

Groups = Sequence[Mapping[str, Any]]


class OptimizerStates(Mapping[Tensor, dict[str, Any]]):
    """States by parameter of `groups`, copied when they are asked for. A parameter without an update has none."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        """Return the states of a parameter by torch's names; those of a part are flat."""
        return local_optimizer_state(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        """Go through the parameters that have states."""
        return (parameter for parameter in members(self._groups) if self[parameter])

    def __len__(self) -> int:
        """Return how many parameters have states."""
        return sum(1 for _ in self)


def members(groups: Groups) -> Iterator[Any]:
    """Go through the parameters of optimizer groups."""
    return (parameter for group in groups for parameter in group["params"])


def state_dict_of(groups: Groups, hyperparameters: Groups) -> dict[str, Any]:
    """Return what torch's `state_dict` has: states and members by the place of each parameter in the groups."""
    places = {id(parameter): place for place, parameter in enumerate(members(groups))}
    states = {places[id(parameter)]: state for parameter, state in OptimizerStates(groups).items()}
    own = [[places[id(parameter)] for parameter in group["params"]] for group in groups]
    return {
        "state": states,
        "param_groups": [{**values, "params": params} for values, params in zip(hyperparameters, own, strict=True)],
    }


def load_states(groups: Groups, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Take over the states of a `state_dict`, of the same groups on as many ranks."""
    parameters = [*members(groups)]
    for place, state in saved.items():
        set_local_optimizer_state(parameters[place], state)
