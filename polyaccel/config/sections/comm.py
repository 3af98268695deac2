"""Sections about collectives: `comm` (polyaccel's own) and `comms_logger`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyaccel.config.section import Listed, PositiveFloat, Section

LoggedOp = Literal[
    "all_reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "send",
    "recv",
    "isend",
    "irecv",
    "barrier",
]
"""Names of operations; torch's longer ones stand for the shorter."""


class CommConfig(Section):
    """polyaccel's own section: which backend carries the collectives, and how long one may take."""

    backend: str | None = None
    """Name of an installed plugin of the group `polyaccel.comm`; null is the accelerator's own choice."""
    timeout_s: Annotated[PositiveFloat, Field(le=1e9)] = 600.0
    """Seconds after which a collective that some rank has not joined is an error that names the missing ranks."""
    debug: bool = False
    """Compare every collective's op, numel and dtype over the ranks before it runs, and name the rank that differs."""
    dump_dir: str | None = None
    """The folder for each rank's flight recorder when a collective times out, a rank ends by an exception, or gets
    SIGUSR1; null is `POLYACCEL_DUMP_DIR`, else a folder next to temporary files that the log names."""


class CommsLoggerConfig(Section):
    """How long collectives take, by operation and size; `polyaccel.comm.log_summary()` prints it."""

    enabled: bool = False
    """Record how long each collective takes, without waiting for the device. Unlike in DeepSpeed, false means off
    although the section is there."""
    verbose: bool = False
    """Log a line for every call as it ends, which waits for the device; rank 0 shows its own."""
    prof_all: bool = True
    """Record all operations; false selects `prof_ops`."""
    debug: bool = False
    """Count calls apart by the function that makes them."""
    prof_ops: Listed[tuple[LoggedOp, ...]] = ()
    """The operations to record when `prof_all` is false."""

    @model_validator(mode="after")
    def _names_something(self) -> CommsLoggerConfig:
        if self.enabled and not self.prof_all and not self.prof_ops:
            raise ValueError("prof_all is false and prof_ops names no operation, so that nothing would be recorded")
        return self
