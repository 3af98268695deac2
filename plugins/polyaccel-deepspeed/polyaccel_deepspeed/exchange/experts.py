"""Experts in DeepSpeed's checkpoints, which polyaccel has in stacks.

[Note: Expert file names]
Files `layer_L_expert_E_mp_rank_00_model_states.pt` have an expert's weights by its number in the layer. Files of
optimizer states have its number on the rank that wrote them: each of the ranks that share a layer's experts calls its
first one 0. Which ranks these are follows from how many parts a group has (`partition_count`): with two parts on four
ranks, two ranks share experts, neighbours, or with `use_data_before_expert_parallelism` ranks as far apart as can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from polyaccel.errors import CheckpointError

FILE = r"(?:layer_\d+_)?expert_\d+_mp_rank_00_model_states\.pt"
_NAME = re.compile(r"((?:.*\.)?experts\.)deepspeed_experts\.(\d+)\.(.+)")


def stack_of(fqn: str) -> tuple[str, int] | None:
    """The stack that has an expert's parameter, and the expert's number; None for any other parameter."""
    found = _NAME.fullmatch(fqn)
    return None if found is None else (found[1] + found[3].replace(".", "_"), int(found[2]))


def with_stacks(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose single experts, if it has any, are stacks. Raises CheckpointError where one is missing."""
    found: dict[str, dict[int, Any]] = {}
    rest: dict[str, Any] = {}
    for name, value in state.items():
        place = stack_of(name)
        if place is None:
            rest[name] = value
        else:
            found.setdefault(place[0], {})[place[1]] = value
    for stack, experts in found.items():
        _require_all(stack, experts, "values")
        rest[stack] = torch.stack([experts[number] for number in range(len(experts))])
    return rest


def owners(
    shapes: Iterable[str], states: Sequence[Mapping[str, Any]], index: int, config: Mapping[str, Any]
) -> list[list[int]]:
    """The ranks that have the parts of group `index`, whose parameters are `shapes`, in the order of parts: one list
    for each of the ranks that share experts; a single one for a group without experts."""
    ranks = len(states)
    if not any(map(stack_of, shapes)):
        return [[*range(ranks)]]
    counts = states[0].get("partition_count")
    parts = counts[index] if isinstance(counts, list) else counts
    if not isinstance(parts, int) or parts < 1 or ranks % parts:
        raise CheckpointError(
            f"experts of {ranks} ranks are in {parts} parts", hint="give the files of all ranks", value=parts
        )
    sharing = ranks // parts
    if config.get("use_data_before_expert_parallelism"):
        return [[first * parts + part for part in range(parts)] for first in range(sharing)]
    return [[first + sharing * part for part in range(parts)] for first in range(sharing)]


class Stacks:
    """Stacks of experts as they are found: parts of flat vectors, by stack and kind, then by expert."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[int, tuple[tuple[int, ...], list[Any]]]] = {}

    def add(self, stack: str, kind: str, expert: int, shape: tuple[int, ...], parts: list[Any]) -> None:
        """What there is of one expert, in order."""
        self._found.setdefault((stack, kind), {})[expert] = shape, parts

    def whole(self) -> Iterable[tuple[str, str, tuple[int, ...], list[Any]]]:
        """Stack, kind, shape (experts, ...) and parts, in the order of experts. Raises CheckpointError where one is
        missing."""
        for (stack, kind), experts in self._found.items():
            _require_all(stack, experts, kind)
            ordered = [experts[number] for number in range(len(experts))]
            yield stack, kind, (len(experts), *ordered[0][0]), [part for _, parts in ordered for part in parts]


def _require_all(stack: str, experts: Iterable[int], kind: str) -> None:
    numbers = sorted(experts)
    if numbers != [*range(len(numbers))]:
        raise CheckpointError(
            f"of {stack!r} ({kind}) there are experts {numbers}", hint="give the files of all experts", value=stack
        )
