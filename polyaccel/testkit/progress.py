"""Signs of life: a test announces what it does next, and its time limit counts again from there.

So a limit of seconds is right for a test of minutes too, on a slow machine and on a device that compiles programs, and
a test that hangs is cut soon after its last announcement, which shows where.
"""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def doing(what: str) -> None:
    """Announce what comes next. Without a listener nothing happens."""
    for listener in _listeners:
        listener(what)


def listen(listener: Callable[[str], None]) -> None:
    """Call `listener` with everything that this process announces, from now on."""
    _listeners.append(listener)
