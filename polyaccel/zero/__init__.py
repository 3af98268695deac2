"""The ZeRO engine, and by name what torch users expect of `zero`, which lives in the torch room and loads on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "GatheredParameters": "polyaccel.torch.gathered",
    "Init": "polyaccel.torch.deferred_init",
    "register_external_parameter": "polyaccel.torch.external",
    "set_leaf_modules": "polyaccel.torch.leaf_modules",
    "set_units": "polyaccel.torch.units",
    "unregister_external_parameter": "polyaccel.torch.external",
    "unset_leaf_modules": "polyaccel.torch.leaf_modules",
    "unwrap_model_for_generation": "polyaccel.torch.gathered",
}

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "set_leaf_modules",
    "set_units",
    "unregister_external_parameter",
    "unset_leaf_modules",
    "unwrap_model_for_generation",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polyaccel.zero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
