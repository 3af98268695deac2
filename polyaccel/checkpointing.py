"""Activation checkpointing by DeepSpeed's names; the code lives in `polyaccel.torch` and loads when a name is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyaccel.torch.api.activations import checkpoint as checkpoint
    from polyaccel.torch.api.activations import configure as configure
    from polyaccel.torch.api.activations import is_configured as is_configured
    from polyaccel.torch.api.activations import non_reentrant_checkpoint as non_reentrant_checkpoint
    from polyaccel.torch.api.activations import reset as reset

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("polyaccel.torch.api.activations"), name)
    raise AttributeError(f"module 'polyaccel.checkpointing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
