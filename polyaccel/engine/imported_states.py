"""An imported checkpoint in the words of the run that loads it: see [Note: Imported optimizer states] in
`polyaccel.checkpoint.format.imported`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.format.imported import IMPORTED, Imported, position_name
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM
from polyaccel.checkpoint.load.name_map import RenamedReader
from polyaccel.engine.resume import TrainingRun
from polyaccel.errors import CheckpointError, ConfigError, Problem
from polyaccel.zero.update.optimizers import PeerState

_VERSIONS = frozenset(
    {"_step_count", "_get_lr_called_within_step", "_last_lr", "_is_initial", "verbose", "_initial_step_count"}
)
"""Of a schedule's state, what comes and goes with the version of torch."""


def state_names(saved: CheckpointReader, order: Sequence[Sequence[str]] | None, *, wanted: bool) -> Mapping[str, str]:
    """The names of optimizer states that were saved by position, by parameter; `order` has the parameters of each of
    this run's groups. Nothing where they have names.

    Raises CheckpointError where this run's parameters have no order, ConfigError for other groups than the saved ones.
    """
    section = saved.scalars.get(IMPORTED)
    counts = None if section is None or not wanted else Imported.model_validate(section).positions
    if counts is None:
        return {}
    if order is None:
        raise CheckpointError(
            f"checkpoint {saved.tag!r} has optimizer states by position, and this run's parameters have names alone",
            hint="load_optimizer_states=False begins with a new optimizer",
            value=saved.tag,
        )
    if [*map(len, order)] != counts:
        expected = f"the imported optimizer has groups of {counts} parameters, without their names"
        hint = "build the same groups in the same order; load_optimizer_states=False begins with a new optimizer"
        raise ConfigError([Problem("optimizer.param_groups", [*map(len, order)], expected, hint)])
    return {fqn: position_name(group, index) for group, names in enumerate(order) for index, fqn in enumerate(names)}


def own_scalars(
    run: TrainingRun, reader: RenamedReader, members: Mapping[str, int | None], *, wanted: bool
) -> dict[str, Any]:
    """The plain values of `reader` as this run would have saved them: see [Note: Imported optimizer states]. Those of
    its own checkpoints stay as they are. `members` has the group of each trained parameter; optimizer states are
    `wanted`.

    Raises CheckpointError where this run's optimizer cannot continue from the states.
    """
    scalars = reader.scalars
    optimizer = run.zero.optimizer
    saved = scalars.get("optimizer")
    if not wanted or optimizer is None or run.groups is None or saved is None:
        return scalars
    if IMPORTED not in scalars:
        if scalars.get("optimizer_kind") is None:
            raise CheckpointError(
                f"checkpoint {reader.tag!r} was imported by an earlier version, and does not name its optimizer",
                hint="import it again; load_optimizer_states=False begins with a new optimizer",
                value=reader.tag,
            )
        return scalars
    imported = Imported.model_validate(scalars[IMPORTED])
    kinds: dict[str, set[str]] = {}
    shapes = {param.fqn: tuple(param.global_shape) for param in run.zero.layout.params}
    for entry in reader.tensors():
        if entry.kind not in (PARAM, BUFFER):
            kinds.setdefault(entry.fqn, set()).add(entry.kind)
            if shapes.get(entry.fqn, tuple(entry.shape)) != tuple(entry.shape):
                raise CheckpointError(
                    f"{entry.kind!r} of {entry.fqn!r} has the shape {tuple(entry.shape)} in checkpoint {reader.tag!r}, "
                    f"the parameter {shapes[entry.fqn]}",
                    hint="build the optimizer's groups in the saved order; load_optimizer_states=False begins with a "
                    "new optimizer",
                    value=tuple(entry.shape),
                )
    states = frozenset[str]().union(*kinds.values())
    groups = optimizer.adopt_groups(PeerState(imported.family, states, saved["param_groups"]))
    names = saved.get("param_names")
    if names is not None:
        groups = _by_name(run, reader, members, groups, names)
    numbers = scalars.get("client_optimizer") or {}
    own = {fqn: numbers[name] for fqn in members if (name := reader.state_name(fqn)) in numbers}
    return {
        **scalars,
        "optimizer": {"param_groups": groups},
        "optimizer_kind": run.optimizer_kind,
        "client_optimizer": own,
    }


def _by_name(
    run: TrainingRun,
    reader: RenamedReader,
    members: Mapping[str, int | None],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Collection[str]],
) -> list[dict[str, Any]]:
    """Return for each group the hyperparameters that its parameters had, else its own."""
    assert run.groups is not None
    positions = {name: index for index, each in enumerate(names) for name in each}
    found: list[tuple[str, Mapping[str, Any]] | None] = [None for _ in run.groups]
    for fqn, group in members.items():
        position = positions.get(reader.saved_name(fqn))
        if group is None or position is None:
            continue
        first = found[group]
        if first is None:
            found[group] = fqn, groups[position]
        elif first[1] != groups[position]:
            raise CheckpointError(
                f"{first[0]!r} and {fqn!r} are in one group of this run's optimizer, and had different hyperparameters "
                f"in checkpoint {reader.tag!r}: {dict(first[1])} and {dict(groups[position])}",
                hint="build the groups that were saved; load_optimizer_states=False begins with a new optimizer",
                value=fqn,
            )
    own = [{key: value for key, value in group.items() if key != "params"} for group in run.groups]
    return [ours if each is None else dict(each[1]) for ours, each in zip(own, found, strict=True)]


def own_schedule_state(tag: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule's imported state with the types of `ours`."""
    differing = sorted((saved.keys() ^ ours.keys()) - _VERSIONS)
    differing += [key for key, value in ours.items() if key in saved and _kind_of(value) != _kind_of(saved[key])]
    if differing:
        raise CheckpointError(
            f"the learning-rate schedule in checkpoint {tag!r} is of another kind than this run's: "
            f"they differ in {', '.join(map(repr, differing[:8]))}",
            hint="build the schedule that was saved; load_lr_scheduler_states=False begins with a new one",
            value=differing,
        )
    found = dict(saved)
    for key, value in saved.items():
        mine = ours.get(key)
        if isinstance(value, list) and isinstance(mine, list) and all(isinstance(each, Mapping) for each in mine):
            found[key] = [own_schedule_state(tag, each, other) for each, other in zip(value, mine, strict=True)]
        elif isinstance(value, Mapping) and isinstance(mine, dict) and type(mine) is not type(value):
            found[key] = type(mine)(value)  # a Counter
    return found


def _kind_of(value: Any) -> tuple[str, int]:
    """What two states of schedules of one kind have in common: mappings, and lists of as many schedules."""
    if isinstance(value, Mapping):
        return "mapping", 0
    if isinstance(value, (list, tuple)):
        return "list", len(value) if any(isinstance(each, Mapping) for each in value) else 0
    return "value", 0
