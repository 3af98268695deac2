"""The devices of this machine, found without importing torch: by their files, and by what torch was built for.

The `probe()` of every built-in accelerator is made of these functions. That a package can be imported proves nothing
about a device.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyaccel.core.types import Probe

DEVICE_PRIORITY = 100

_INTEL_VENDOR = "0x8086"


def usable(reason: str) -> Probe:
    return Probe(usable=True, reason=reason, priority=DEVICE_PRIORITY)


def unusable(reason: str) -> Probe:
    return Probe(usable=False, reason=reason, priority=DEVICE_PRIORITY)


def loaded_torch() -> Any:
    """The torch module if this process has imported it already, else None."""
    return sys.modules.get("torch")


def ask_torch(device_type: str) -> Probe | None:
    """The answer of a probe that asks the loaded torch for devices of this type; None when torch is not loaded."""
    torch = loaded_torch()
    if torch is None:
        return None
    module = getattr(torch, device_type, None)
    if module is None:
        return unusable(f"torch {torch.__version__} has no torch.{device_type}")
    count = module.device_count() if module.is_available() else 0
    if count:
        return usable(f"torch {torch.__version__} sees {count} {device_type} device{'s' if count > 1 else ''}")
    return unusable(f"torch {torch.__version__} sees no {device_type} device")


def torch_build() -> dict[str, str] | None:
    """Version and toolkits of the installed torch: {"version": "2.13.0+cpu", "cuda": "12.8", "hip": ..., "xpu": ...}.

    Toolkits that it was built without are missing. None without torch. Reads the file `torch/version.py`.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return {}
    found = re.findall(r"^(__version__|cuda|hip|xpu)\b[^=\n]*=\s*'([^'\n]*)'", text, flags=re.MULTILINE)
    return {name.strip("_"): value for name, value in found}


def built_for(*toolkits: str) -> str | None:
    """Why the installed torch cannot drive a device of any of these toolkits; None when it can."""
    build = torch_build()
    if build is None:
        return "torch is not installed"
    if not any(build.get(toolkit) for toolkit in toolkits):
        return f"the installed torch {build.get('version', '')} was built without {' or '.join(toolkits)}"
    return None


def hidden_by(variable: str) -> str | None:
    """Why `variable` hides every device ("" and "-1" do), or None."""
    value = os.environ.get(variable)
    return f"{variable}={value!r} hides every device" if value is not None and value.strip() in ("", "-1") else None


def first_existing(patterns: Iterable[str]) -> str | None:
    """The first path that matches one of the glob `patterns`."""
    return next((path for pattern in patterns for path in sorted(glob(pattern))), None)


def works(attempt: Callable[[], object]) -> bool:
    """Whether `attempt` neither raises nor returns False. Devices refuse by exceptions of every kind."""
    try:
        return attempt() is not False
    except Exception:
        return False


def intel_render_node() -> str | None:
    """A render node of an Intel GPU, as /dev/dri/renderD128."""
    for node in sorted(glob("/dev/dri/renderD*")):
        vendor = Path("/sys/class/drm") / Path(node).name / "device" / "vendor"
        try:
            if vendor.read_text().strip() == _INTEL_VENDOR:
                return node
        except OSError:
            continue
    return None
