"""A model as the planner sees it: the shapes of its parameters and which of them are unsharded together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyaccel.comm.benchmark import CollectiveTimings, bus_factor
from polyaccel.core.block import Block
from polyaccel.core.types import DType, ParamSpec
from polyaccel.zero.plan.bucket_plan import StepPlan
from polyaccel.zero.plan.traffic import PlannedCollective, exchanges_of, gathers_of

_COUNT = re.compile(r"(\d+(?:\.\d*)?)(?:[eE]\+?(\d{1,2}))?([KMBT]?)")
_POWERS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
BLOCKS = 32
"""Equal blocks that stand for a model of which only the number of parameters is known."""
_PARAMS_A_BLOCK = 8


@dataclass(frozen=True)
class ModelShape:
    """A model without values. `specs` stand in the order in which gradients appear, `units` as for `plan_layout`.

    `buffer_nbytes` are those of its buffers, such as running statistics; `summary` says in a few words what it is.
    """

    summary: str
    specs: tuple[ParamSpec, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    buffer_nbytes: int = 0

    @property
    def numel(self) -> int:
        """The parameters of the whole model, whatever a rank holds of it."""
        return sum(spec.global_numel for spec in self.specs)

    @property
    def trained_numel(self) -> int:
        return sum(spec.global_numel for spec in self.specs if spec.trainable)


def parse_count(text: str) -> int | None:
    """The number of parameters that `text` names (`7e9`, `1.3B`, `124M`, `5000`); None if it names none."""
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    digits, exponent, suffix = match.groups()
    whole, _, decimals = digits.partition(".")
    power = int(exponent or 0) + _POWERS[suffix] - len(decimals)
    mantissa = int(whole + decimals)
    scale: int = 10 ** abs(power)
    return mantissa * scale if power >= 0 else mantissa // scale


def shape_of_count(numel: int, dtype: DType, tensor_ranks: int = 1) -> ModelShape:
    """Return a stand-in of `numel` parameters: equal blocks of equal matrices, shared by tensor ranks."""
    parts = BLOCKS * _PARAMS_A_BLOCK
    specs, units = [], {}
    for index in reversed(range(parts)):
        size = numel // parts + (index < numel % parts)
        if size:
            unit = f"block{index // _PARAMS_A_BLOCK}"
            own = -(-size // tensor_ranks)
            cut = (Block.whole((size,)).cut(0, (0, own)), ("tensor",)) if tensor_ranks > 1 else ()
            specs.append(ParamSpec(f"{unit}.{index % _PARAMS_A_BLOCK}", (own,), dtype, 0, True, *cut))
            units[specs[-1].fqn] = unit
    return ModelShape(f"a model taken as {BLOCKS} equal blocks", tuple(specs), units)


@dataclass(frozen=True, slots=True)
class ActivationNeeds:
    """Bytes of one pass on one rank: those kept for backward at the end of the forward pass, and the most at a time in
    both. `way` is what is recomputed; `is_own`: it is what the config asks for."""

    way: str
    kept_nbytes: int
    peak_nbytes: int
    is_own: bool


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """A stage of a pipeline: the blocks of its chunks, and what a rank there holds of the model. `kept` are the most
    forward passes that it keeps for their backward passes, and `peak_nbytes` the most bytes of activations at a time,
    by the schedule's table; None where the length of rows is unknown."""

    blocks: tuple[str, ...]
    model: ModelShape
    kept: int
    peak_nbytes: int | None


def comm_seconds(plan: StepPlan, table: CollectiveTimings) -> float:
    """Return seconds of the plan's collectives, none overlapped, by a measured table."""
    return sum(_seconds(each, table) for each in (*gathers_of(plan), *exchanges_of(plan)) if each.sent_nbytes)


def _seconds(each: PlannedCollective, table: CollectiveTimings) -> float:
    """A collective of n ranks sends its bus factor times its size, whatever the elements on the way are."""
    nbytes = round(each.sent_nbytes / bus_factor(each.kind, each.ranks))
    return table.seconds(each.kind, nbytes, each.ranks)
