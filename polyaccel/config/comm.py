"""Sections about collectives: `comm` (polyaccel's own) and `comms_logger`."""

from __future__ import annotations

from polyaccel.config.section import Listed, PositiveFloat, Section


class CommConfig(Section):
    """polyaccel's own section: which backend carries the collectives, and how long one may take."""

    backend: str | None = None
    """Name of an installed plugin of the group `polyaccel.comm`; null is the accelerator's own choice."""
    timeout_s: PositiveFloat = 600.0
    """Seconds after which a collective that some rank has not joined is an error that names the missing ranks."""


class CommsLoggerConfig(Section):
    """Recording of collectives."""

    enabled: bool = False
    """Compare every collective's op, numel and dtype over the ranks and name the rank that differs. Unlike in
    DeepSpeed, false means off although the section is there."""
    verbose: bool = False
    """Print every collective."""
    prof_all: bool = True
    """Record all operations; false selects `prof_ops`."""
    debug: bool = False
    """Add the calling function to each record."""
    prof_ops: Listed[tuple[str, ...]] = ()
    """The operations to record."""
