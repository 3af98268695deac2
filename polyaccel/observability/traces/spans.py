"""What lay between two moments of a rank: the record that traces are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AGAIN = "again "
"""The name of a unit's span begins so where its forward pass is computed again in backward."""


@dataclass(frozen=True, slots=True)
class Span:
    """`kind` is step, phase, unit, pipeline, tier or collective. Seconds are those of the rank's own wall clock, or of
    rank 0's once a trace is read. A collective has in `more`: `group` (global ranks), `number` on that group, `bucket`,
    `label`, `numel`, `dtype`, and `waited_s`, how long at its end the rank did nothing else. A tier's transfer has
    `waited_s`, `tier` and `nbytes`.
    """

    kind: str
    name: str
    begin_s: float
    end_s: float
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s
