"""The sections of what is timed: `timers`, `trace`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from polyaccel.config.section import Listed, PositiveInt, Section


class ThroughputConfig(Section):
    """The work of a step, a second."""

    enabled: bool = False
    """Count tokens and the model's floating-point operations too: `engine.metrics` has `tokens_per_s`, `tflops` of a
    rank, and what share that is of the device's speed in a large product. The first pass with inputs of a new shape
    takes longer. Samples a second are always there."""
    synchronized: bool = False
    """Wait for the device at the end of each step, so that its time is that of its own work. False costs nothing; the
    times are right on average."""


class TimersConfig(Section):
    """What is timed beside the phases of a step (`wall_clock_breakdown`)."""

    throughput: ThroughputConfig = ThroughputConfig()
    """The work of a step, a second."""


class TraceConfig(Section):
    """polyaccel's own section: what every rank did in a few steps, as one file for Perfetto (ui.perfetto.dev) and
    chrome://tracing."""

    steps: Listed[Annotated[tuple[PositiveInt, ...], Field(min_length=2, max_length=2)]]
    """The first and the last optimizer step that are traced, from 1."""
    folder: str | None = None
    """The folder of `trace.json`; null is `run_folder`, or the working directory."""

    @model_validator(mode="after")
    def _in_order(self) -> TraceConfig:
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"should be the first and the last step, in this order, not {list(self.steps)}")
        return self
