"""The optimizer's groups in a checkpoint: saved with their parameters' names, matched by name at a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from polyaccel.errors import CheckpointError, ConfigError, Problem


class SavedGroups(BaseModel):
    """The optimizer's groups in a checkpoint: hyperparameters, and the parameters' names where there are several."""

    param_groups: list[dict[str, Any]]
    param_names: list[list[str]] | None = None


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group without its parameters, numpy's scalars as Python's: schedules in numpy write them there."""
    return {key: _as_python(value) for key, value in group.items() if key != "params"}


def _as_python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_as_python, value)) if type(value) in (list, tuple) else value


def match_groups(
    groups: Sequence[Mapping[str, Any]],
    saved: SavedGroups,
    members: Mapping[str, int | None],
    saved_name: Callable[[str], str],
) -> list[int | None]:
    """Find for each of `groups` the index of the saved group whose hyperparameters it takes over.

    `members` has the index of each trained parameter's group; `saved_name` gives the name that it was saved under. A
    group none of whose parameters was in a saved one keeps its own hyperparameters (None), unless both are empty.
    Without saved names, groups match by position.

    Raises ConfigError when the groups are not as many as the saved ones, CheckpointError naming the parameters where
    one group has parameters of saved groups with different hyperparameters.
    """
    require_as_many(groups, saved.param_groups)
    if saved.param_names is None:
        return list(range(len(groups)))
    positions = {name: index for index, names in enumerate(saved.param_names) for name in names}
    sources: list[dict[int, str]] = [{} for _ in groups]
    for fqn, group in members.items():
        position = positions.get(saved_name(fqn))
        if group is not None and position is not None:
            sources[group].setdefault(position, fqn)
    for index, found in enumerate(sources):
        first = next(iter(found), None)
        if first is not None and any(saved.param_groups[each] != saved.param_groups[first] for each in found):
            moved = ", ".join(f"{fqn!r} of saved group {each}" for each, fqn in sorted(found.items()))
            raise CheckpointError(
                f"optimizer group {index} has parameters of saved groups with other hyperparameters: {moved}",
                hint="build the groups that were saved; load_optimizer_states=False begins with a new optimizer",
                value=sorted(found.values()),
            )
    return [next(iter(found), None if saved.param_names[index] else index) for index, found in enumerate(sources)]


def load_groups(
    groups: Sequence[MutableMapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    sources: Sequence[int | None] | None = None,
) -> None:
    """Take over hyperparameters of saved groups at `sources` (None: by position)."""
    require_as_many(groups, saved)
    for group, source in zip(groups, range(len(groups)) if sources is None else sources, strict=True):
        if source is not None:
            values = saved[source]
            group.update({key: tuple(value) if key == "betas" else value for key, value in values.items()})


def require_as_many(groups: Sequence[object], saved: Sequence[object]) -> None:
    """Raise ConfigError when there are not as many `groups` as `saved` ones."""
    if len(groups) != len(saved):
        expected = f"the checkpoint has {len(saved)} optimizer groups"
        raise ConfigError([Problem("optimizer.param_groups", len(groups), expected, "build the same groups")])


def require_order(state: Mapping[str, Any], sources: Sequence[int | None], tag: str) -> None:
    """Raise CheckpointError where `state` has different values by group and the groups' order changed."""
    if list(sources) == list(range(len(sources))):
        return
    for name, values in state.items():
        if (
            isinstance(values, (list, tuple))
            and len(values) == len(sources)
            and any(value != values[0] for value in values)
        ):
            raise CheckpointError(
                f"the schedule in checkpoint {tag!r} has {name!r} by position of groups that are in another order here",
                hint="build the groups in the saved order; load_lr_scheduler_states=False begins with a new schedule",
                value=name,
            )
