"""How long a table takes: a simulation from the times of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyaccel.pipeline.table import PipelineError, PipelineTable
from polyaccel.pipeline.timeline import compute_timeline


@dataclass(frozen=True)
class OpTimes:
    """How long each chunk takes for its parts of a micro-batch, by chunk, and how long a message is under way between
    stages. BACKWARD takes the two parts of a backward pass together. Any unit, the same for all."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def even(
        cls,
        chunks: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
    ) -> OpTimes:
        """The times of `chunks` that are all the same."""
        return cls((forward,) * chunks, (backward_input,) * chunks, (backward_weight,) * chunks, transfer)

    @property
    def durations(self) -> tuple[Sequence[float], ...]:
        """By operation and chunk."""
        whole = [first + second for first, second in zip(self.backward_input, self.backward_weight, strict=True)]
        return self.forward, whole, self.backward_input, self.backward_weight


@dataclass(frozen=True)
class PipelineTiming:
    """When every task of `table` begins and ends, by stage and in order, in the unit of the times it was made from."""

    table: PipelineTable
    starts: list[list[float]]
    ends: list[list[float]]

    @property
    def makespan(self) -> float:
        """From the begin of the first task to the end of the last, over all stages."""
        return max(ends[-1] for ends in self.ends)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each stage computes."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(float(np.subtract(ends, starts).sum()) for starts, ends in pairs)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each stage does not compute, of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def waiting(self) -> tuple[float, ...]:
        """Return each stage's wait between its first and last task, idle even in back-to-back steps."""
        pairs = zip(self.starts, self.ends, self.busy, strict=True)
        return tuple(ends[-1] - starts[0] - busy for starts, ends, busy in pairs)

    @property
    def bubble_share(self) -> float:
        """Return the idle share of all stages: (p - 1) / (m + p - 1) for even 1F1B."""
        return sum(self.idle) / (self.makespan * self.table.stages)

    @property
    def overhead(self) -> float:
        """Return makespan over the busiest stage's work, less 1: (p - 1) / (m v) for even chunks."""
        return self.makespan / max(self.busy) - 1


def simulate(table: PipelineTable, times: OpTimes) -> PipelineTiming:
    """Simulate a checked table. Raises PipelineError for other numbers of chunks, and cycles."""
    if any(len(part) != table.chunks for part in times.durations):
        raise PipelineError(
            f"times of {[len(part) for part in times.durations]} chunks for a table of {table.chunks}",
            hint="give a time for each chunk",
            value=times,
        )
    walked = compute_timeline(table, times.durations, times.transfer)
    if walked.stuck:
        raise PipelineError(f"stages {list(walked.stuck)} of {table.name} wait for ever", hint="check_table shows why")
    return PipelineTiming(table, walked.starts, walked.ends)
