"""JAX under the engine. Every name loads what it needs when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyaccel.interop.jax_to_torch import as_torch as as_torch
    from polyaccel.jax.native.mesh import init_distributed as init_distributed
    from polyaccel.jax.program.batches import replicated as replicated
    from polyaccel.jax.program.units import scan_units as scan_units
    from polyaccel.jax.program.units import unit as unit

__all__ = ["as_torch", "init_distributed", "replicated", "scan_units", "unit"]

_HOMES = {
    "as_torch": "polyaccel.interop.jax_to_torch",  # the package of both frameworks is above this one
    "init_distributed": "polyaccel.jax.native.mesh",
    "replicated": "polyaccel.jax.program.batches",
    "scan_units": "polyaccel.jax.program.units",
    "unit": "polyaccel.jax.program.units",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'polyaccel.jax' has no attribute {name!r}")
