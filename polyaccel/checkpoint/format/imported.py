"""The section of a checkpoint's plain values that an import adds.

[Note: Imported optimizer states]
Another tool's checkpoint contains less and more than ours: which family of optimizers its states belong to, groups with
their parameters' names (or a group for each parameter), or only the position of a parameter in its group, as torch's
own `state_dict` has it. `polyaccel.checkpoint.convert` writes that down (`Imported`); what it means is resolved once
there is an engine: `polyaccel.engine.imported_states` makes of it the plain values that the engine itself would have
saved, or refuses.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

IMPORTED = "imported"
"""The plain value that an import adds to those of a run."""


class Imported(BaseModel):
    """What an import records of an optimizer: the family that reads its states (None: unknown), and, where its states
    have no names of parameters but positions in groups, how many parameters each group has."""

    model_config = ConfigDict(strict=True, frozen=True)

    family: str | None = None
    positions: list[int] | None = None


def position_name(group: int, index: int) -> str:
    """The name of the states of a parameter that is identified by its position in a group."""
    return f"param_groups.{group}.params.{index}"
