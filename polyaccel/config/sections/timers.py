"""The sections of what is timed, counted and looked for: `timers`, `trace`, `alarms`, `flops_profiler`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from polyaccel.config.section import CountInt, Int, Listed, NonNegativeFloat, PositiveInt, Section


class ThroughputConfig(Section):
    """The work of a step, a second."""

    enabled: bool = False
    """Count tokens and the model's floating-point operations too: `engine.metrics` has `tokens_per_s`, `tflops` of a
    rank, and what share that is of the device's speed in a large product. The first pass with inputs of a new shape
    takes longer. Samples a second are always there."""
    synchronized: bool = False
    """Wait for the device at the end of each step, so that its time is that of its work. False costs nothing; the times
    are right on average."""


class TimersConfig(Section):
    """What is timed in addition to the phases of a step (`wall_clock_breakdown`)."""

    throughput: ThroughputConfig = ThroughputConfig()
    """The work of a step, a second."""


class TraceConfig(Section):
    """polyaccel's own section: what every rank did in a few steps, as one file for Perfetto (ui.perfetto.dev) and
    chrome://tracing."""

    steps: Listed[Annotated[tuple[PositiveInt, ...], Field(min_length=2, max_length=2)]]
    """The first and the last optimizer step that are traced, from 1."""
    dir: str | None = None
    """The folder of `trace.json`; null is `run_dir`, or the working directory."""
    profiler: bool = False
    """Add what the framework's own profiler records of these steps: torch's operators and a device's kernels, XLA's
    operations. The steps take longer, and the file may become large."""

    @model_validator(mode="after")
    def _in_order(self) -> TraceConfig:
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"should be the first and the last step, in this order, not {list(self.steps)}")
        return self


class AlertsConfig(Section):
    """polyaccel's own: sentences about what is wrong with a run, each with its hint, in the log of rank 0 and wherever
    figures go. A threshold of 0 leaves out its alarm."""

    enabled: bool = False
    """Look."""
    every: PositiveInt = 10
    """Optimizer steps after which the ranks send rank 0 their figures, in one small exchange."""
    window: Int = Field(50, ge=10)
    """Steps that a loss and a norm are compared with, from half of them on; none while the learning rate warms up. The
    same is not logged again within so many steps."""
    loss: NonNegativeFloat = 10.0
    """A spike: how many deviations a step's loss lies above the median, by the median absolute deviation."""
    grad_norm: NonNegativeFloat = 10.0
    """An explosion: the same of the norm of the gradients, at least 2.7 times the median."""
    straggler: NonNegativeFloat = 0.1
    """The share of a step that all ranks wait for one of them, in three exchanges in a row."""
    data: NonNegativeFloat = 0.1
    """The share of a step that a rank waits for its next micro-batch, in three exchanges in a row."""
    memory_growth: NonNegativeFloat = 0.02
    """The growth of a rank's memory, as a share of it, that continues over sixteen exchanges or more."""
    replicas: CountInt = 100
    """Optimizer steps in which every rank digests its copies of replicated weights once, a part in each step. A rank
    whose copy differs is named, with the parameter."""


class FlopsProfilerConfig(Section):
    """Parameters, operations, times and rates of each module, in one optimizer step on rank 0."""

    enabled: bool = False
    """Profile one step. The first of its micro-batches is counted under torch's dispatcher, which takes longer, the
    next one is timed. A JAX function is traced, and shown by `jax.named_scope`, without times."""
    profile_step: PositiveInt = 1
    """The optimizer step, from 1."""
    module_depth: Int = Field(-1, ge=-1)
    """The depth down to which modules are shown; -1 is all."""
    top_modules: CountInt = 1
    """How many classes of modules are named at each depth, those with most operations."""
    detailed: bool = True
    """Show a row for every module."""
    output_file: str | None = None
    """The file for the table, and next to it a picture of the same name; null is the log, and the picture goes to
    `run_dir` if there is one."""
    recompute_fwd_factor: NonNegativeFloat = 0.0
    """The share of a forward pass that the backward pass computes again, for the operations of a step."""
