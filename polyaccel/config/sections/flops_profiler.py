"""The section of the operation profiler: `flops_profiler`."""

from __future__ import annotations

from pydantic import Field

from polyaccel.config.section import CountInt, Int, NonNegativeFloat, PositiveInt, Section


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
    """The file for the table, and beside it a picture of the same name; null is the log, and the picture goes to
    `run_folder` if there is one."""
    recompute_fwd_factor: NonNegativeFloat = 0.0
    """The share of a forward pass that the backward pass computes again, for the operations of a step."""
