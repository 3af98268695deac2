"""The identity of a machine's processor, for what holds on one kind of processor alone."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

_IDENTITY = ("model name", "cpu family", "model", "stepping", "flags", "CPU part", "Features")


def processor_identity() -> str:
    """This machine's processor in a line: its name, and a digest of the features that others of that name may lack."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.processor()} {platform.machine()}"
    first = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in first.items()}
    described = json.dumps([facts.get(name, "") for name in _IDENTITY])
    return f"{facts.get('model name', platform.machine())} {hashlib.sha256(described.encode()).hexdigest()[:8]}"
