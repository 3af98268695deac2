"""Any device that JAX supports and torch does not, without a plugin of ours: `device_plugin("name")`.

Packages teach JAX a platform by the namespace package or the entry-point group `jax_plugins`.
"""

from __future__ import annotations

from typing import ClassVar

import jax

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Probe
from polyaccel.accelerators.jax_device import JaxAccelerator


def device_plugin(platform: str) -> type[GenericJaxAccelerator] | None:
    """The accelerator for JAX's devices of this platform; None if JAX has none."""
    try:
        jax.local_devices(backend=platform)
    except (RuntimeError, AssertionError):  # not a platform of this installation, or one that does not start
        return None
    members = {"name": platform, "jax_platform": platform, "__module__": __name__}
    return type(GenericJaxAccelerator.__name__, (GenericJaxAccelerator,), members)


class GenericJaxAccelerator(JaxAccelerator):
    """A platform of JAX that no plugin is for. `device_plugin` makes the classes."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 0)

    @classmethod
    def probe(cls) -> Probe:
        count = len(jax.local_devices(backend=cls.jax_platform))
        found = f"jax {jax.__version__} sees {count} {cls.name} device{'s' if count > 1 else ''}"
        return device_probe.usable(f"{found}; no plugin is for it")
