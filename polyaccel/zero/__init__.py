"""The ZeRO engine, and by name what torch users expect of `zero`, which lives in the torch room and loads on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"Init": "polyaccel.torch.deferred_init"}

__all__ = ["Init"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polyaccel.zero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
