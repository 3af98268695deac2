"""The standard streams of a command that a shell, a service or a scheduler has started without some of them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_MODES = {0: os.O_RDONLY, 1: os.O_WRONLY, 2: os.O_WRONLY}


def open_closed_streams() -> None:
    """Open closed standard streams (`>&-`) as the null device, else the next file takes their number."""
    for descriptor, mode in _MODES.items():
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def flush_output() -> bool:
    """Write what is buffered for standard output; False where it has no reader, as after `| head` or on a full disk."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        drop_output()
        return False
    return True


def drop_output() -> None:
    """Let nothing of standard output be written any more: Python would complain when it ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
