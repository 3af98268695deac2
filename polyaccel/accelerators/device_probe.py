"""Device detection without importing torch: by device files, and by what torch was built for.

The `probe()` of every built-in accelerator consists of these functions. A package that can be imported does not prove
that a device is present.
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
    """Make the probe of a device that is present.

    Args:
        reason: What was found, for people.

    Returns:
        A usable probe with the priority of a device.
    """
    return Probe(usable=True, reason=reason, priority=DEVICE_PRIORITY)


def unusable(reason: str) -> Probe:
    """Make the probe of a device that is absent.

    Args:
        reason: What is missing, for people.

    Returns:
        A probe that is not usable, with the priority of a device.
    """
    return Probe(usable=False, reason=reason, priority=DEVICE_PRIORITY)


def loaded_torch() -> Any:
    """Return the torch module if this process has imported it already, else None."""
    return sys.modules.get("torch")


def ask_torch(device_type: str) -> Probe | None:
    """Probe devices of a type through a torch that is already loaded.

    Args:
        device_type: torch's name of the type, such as "cuda".

    Returns:
        The probe; None when torch is not loaded.
    """
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
    """Read version and toolkits of the installed torch from its file `torch/version.py`.

    Returns:
        Such as {"version": "2.13.0+cpu", "cuda": "12.8", "hip": ..., "xpu": ...}, without toolkits that it was built
        without. None without torch.
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
    """Explain why the installed torch cannot drive a device.

    Args:
        *toolkits: Keys of `torch_build`, of which one suffices.

    Returns:
        The reason; None when torch can.
    """
    build = torch_build()
    if build is None:
        return "torch is not installed"
    if not any(build.get(toolkit) for toolkit in toolkits):
        return f"the installed torch {build.get('version', '')} was built without {' or '.join(toolkits)}"
    return None


def hidden_by(variable: str) -> str | None:
    """Explain why a variable hides every device.

    Args:
        variable: Environment variable, such as CUDA_VISIBLE_DEVICES.

    Returns:
        The reason for the values "" and "-1"; None for all others, and without the variable.
    """
    value = os.environ.get(variable)
    return f"{variable}={value!r} hides every device" if value is not None and value.strip() in ("", "-1") else None


def first_existing(patterns: Iterable[str]) -> str | None:
    """Find the first path that exists.

    Args:
        patterns: Glob patterns, tried in order.

    Returns:
        The first match in sorted order; None without one.
    """
    return next((path for pattern in patterns for path in sorted(glob(pattern))), None)


def works(attempt: Callable[[], object]) -> bool:
    """Return whether an attempt succeeds. Devices refuse by exceptions of every kind.

    Args:
        attempt: Called once.

    Returns:
        Whether it neither raises nor returns False.
    """
    try:
        return attempt() is not False
    except Exception:
        return False


def intel_render_node() -> str | None:
    """Return a render node of an Intel GPU, such as /dev/dri/renderD128; None without one."""
    for node in sorted(glob("/dev/dri/renderD*")):
        vendor = Path("/sys/class/drm") / Path(node).name / "device" / "vendor"
        try:
            if vendor.read_text().strip() == _INTEL_VENDOR:
                return node
        except OSError:
            continue
    return None
