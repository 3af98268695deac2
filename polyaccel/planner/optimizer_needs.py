"""What the optimizer of a config keeps for each parameter, and what of it shards must not cut: as the engine asks it.

An optimizer that the script passes is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from polyaccel.config import ResolvedConfig
from polyaccel.core.types import DType, ParamSpec
from polyaccel.engine.policies.engines import native_optimizer_of
from polyaccel.engine.policies.muon import MUON, element_cost, is_matrix, matrix_states
from polyaccel.engine.policies.steps import step_policy
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.zero.plan.layout import ROW, WHOLE, Granule

ASSUMED_STATES = tuple(OPTIMIZERS["Adam"].states)
"""The states that an optimizer is taken to have when the config names none."""
_MATRICES, _REST = 0, 1
"""Muon's groups."""


@dataclass(frozen=True)
class OptimizerNeeds:
    """The states of a config's optimizer, those of groups that have only some, and the parameters in their groups.

    `state_types` are those of states that do not rest in the type of the config. `granules` and `costs` are as for
    `plan_layout`.
    """

    specs: tuple[ParamSpec, ...]
    state_names: tuple[str, ...]
    state_types: Mapping[str, DType] = field(default_factory=dict)
    group_states: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    granules: Mapping[str, Granule] = field(default_factory=dict)
    costs: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ResolvedConfig, specs: Sequence[ParamSpec]) -> OptimizerNeeds:
        """Return the needs of the config's optimizer; Adam's where the config names none."""
        section = config.optimizer
        averages = step_policy(config).engine_states
        of_averages = dict.fromkeys(averages, DType.FLOAT32)
        if section is None or section.type != MUON:
            row = None if section is None else OPTIMIZERS.get(section.type)
            names = ASSUMED_STATES if row is None else tuple(row.states)
            native = native_optimizer_of(config)
            types, granules = ({}, {}) if native is None else (native[0].state_types, native[0].granules(specs))
            return cls(tuple(specs), (*names, *averages), {**types, **of_averages}, granules=granules)
        grouped = tuple(replace(one, group=_MATRICES if _is_muons(one) else _REST) for one in specs)
        matrices = [one for one in grouped if _is_muons(one)]
        states = matrix_states(section.params["normuon_beta"])
        return cls(
            grouped,
            (*states, *ASSUMED_STATES, *averages),
            of_averages,
            {_MATRICES: (*states, *averages), _REST: (*ASSUMED_STATES, *averages)},
            {one.fqn: ROW if len(one.shape) == 3 and not one.cut else WHOLE for one in matrices},
            {one.fqn: element_cost(*_sides(one), section.params["ns_steps"]) for one in matrices},
        )

    def states_of(self, spec: ParamSpec) -> tuple[str, ...]:
        """The states of a parameter of `specs`."""
        return self.group_states.get(spec.group, self.state_names) if spec.trainable else ()


def _is_muons(spec: ParamSpec) -> bool:
    return spec.trainable and is_matrix(spec.fqn, len(spec.shape))


def _sides(spec: ParamSpec) -> tuple[int, int]:
    shape = spec.global_shape
    return (shape[0], prod(shape[1:])) if len(shape) == 4 else (shape[-2], shape[-1])
