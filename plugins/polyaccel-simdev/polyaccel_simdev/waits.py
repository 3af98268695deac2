"""What makes the host wait for the device, with the place that asked for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from polyaccel_simdev import _device

_BELOW = ("torch.", "polyaccel_simdev.", "polyaccel.accelerators.")
"""Modules that wait because their caller asks for it."""


@dataclass(frozen=True)
class HostWait:
    """`what` waits (`item`, `copy that blocks`, ...), and the function that asked for it, by its module."""

    what: str
    place: str


@contextmanager
def recorded_waits() -> Iterator[list[HostWait]]:
    """Record what makes threads of the host wait for the device meanwhile."""
    waits: list[HostWait] = []
    _device.listen_to_waits(lambda what: waits.append(HostWait(what, _place())))
    try:
        yield waits
    finally:
        _device.listen_to_waits(None)


def _place() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(_BELOW):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""
