"""Signs of life: a test says what it does next, and whoever runs it with a time limit counts anew from there.

So a limit of seconds is right for a test of minutes too, on a slow machine and on a device that compiles programs, and
a test that hangs is cut soon after its last word, which says where.
"""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def doing(what: str) -> None:
    """Say what comes next. Without a listener nothing happens."""
    for listener in _listeners:
        listener(what)


def listen(listener: Callable[[str], None]) -> None:
    """Let `listener` hear of everything that this process does, from now on."""
    _listeners.append(listener)
