"""The update that a device plays from a recording, declared as `polyaccel.ops.base` declares ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from polyaccel.core.buffer import Buffer
from polyaccel.ops.base import Formula, Op


class RecordedUpdateFn(Protocol):
    def __call__(
        self,
        formula: Formula,
        constants: Sequence[float | None],
        numbers: Buffer,
        master: Buffer,
        grad: Buffer,
        states: Sequence[Buffer],
        out: Buffer | None = None,
    ) -> None:
        """Apply one update whose numbers are in memory of the device, with the bits of `UpdateFn`.

        Args:
            formula: What is computed.
            constants: Constants of the formula, in its order. None: the number at that place of `numbers`.
            numbers: float64. The constants of the formula, then the factor of the gradients.
            master: Master weights, updated in place.
            grad: Gradients. May be overwritten.
            states: States of the formula, in its order, updated in place.
            out: Receives the updated weights in its own type; None for nothing.

        Raises:
            ShardingError: See `Rule.check`.
        """


RECORDED_UPDATE: Op[RecordedUpdateFn] = Op("recorded_update", "an update that reads its numbers from device memory")
"""An op that a table holds in addition to `ALL_OPS` where the accelerator claims `graphs`."""
