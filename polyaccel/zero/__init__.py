"""The ZeRO engine, and the names that torch users expect in `zero`, which `polyaccel.torch` has and loads on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "GatheredParameters": "polyaccel.torch.api.gathered",
    "Init": "polyaccel.torch.deferred_init.init",
    "register_external_parameter": "polyaccel.torch.sharding.units",
    "set_leaf_modules": "polyaccel.torch.sharding.leaf_modules",
    "set_units": "polyaccel.torch.sharding.units",
    "unregister_external_parameter": "polyaccel.torch.sharding.units",
    "unset_leaf_modules": "polyaccel.torch.sharding.leaf_modules",
    "unwrap_model_for_generation": "polyaccel.torch.api.gathered",
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
