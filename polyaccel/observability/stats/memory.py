"""Memory in words: what a device and its host have in use, and the part whose purpose is in the plan of a step."""

from __future__ import annotations

from collections.abc import Iterable
from logging import getLogger

from polyaccel.accelerators import get_accelerator
from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.default import default_communicator

log = getLogger(__name__)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown(nbytes: float) -> str:
    """`nbytes` with three digits and its unit: `1.25 GiB`."""
    at = 0
    while nbytes >= 1000 and at < len(_UNITS) - 1:
        nbytes, at = nbytes / 1024, at + 1
    return f"{nbytes:.3g} {_UNITS[at]}"


def memory_in_use(accelerator: Accelerator) -> str:
    """The memory of the device, and of the host where that is another place."""
    host = host_accelerator(accelerator)
    kinds = [("device", accelerator)] if host is accelerator else [("device", accelerator), ("host", host)]
    said = []
    for name, kind in kinds:
        stats = kind.memory_stats()
        said.append(
            f"{name} {shown(stats.allocated_nbytes)} in use, {shown(stats.peak_nbytes)} at most, "
            f"{shown(stats.reserved_nbytes)} reserved, {shown(stats.free_nbytes)} free of {shown(stats.total_nbytes)}"
        )
    return "; ".join(said)


def by_purpose(purposes: Iterable[tuple[str, int]]) -> str:
    """The bytes of each purpose, in words."""
    return ", ".join(f"{name} {shown(nbytes)}" for name, nbytes in purposes if nbytes)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 the memory in use on its device and its host. DeepSpeed's name.

    Args:
        message: Text at the beginning of the log line.
        force: False does nothing, as in DeepSpeed.
    """
    if force and default_communicator().rank == 0:
        log.info("%s: %s", message, memory_in_use(get_accelerator()))
