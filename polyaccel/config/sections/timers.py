"""The section of what is timed: `timers`."""

from __future__ import annotations

from polyaccel.config.section import Section


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
