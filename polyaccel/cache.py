"""The user's cache: files that this package keeps between runs and can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`polyaccel` below `XDG_CACHE_HOME`, or `~/.cache`. The caller makes the folder before it writes there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "polyaccel"
