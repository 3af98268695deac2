"""Torch under the engine. `as_jax`, which makes a module of torch a function of JAX, loads both when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyaccel.interop.torch_to_jax import as_jax as as_jax

__all__ = ["as_jax"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # not imported here: the package of both frameworks is above this one
        return getattr(import_module("polyaccel.interop.torch_to_jax"), name)
    raise AttributeError(f"module 'polyaccel.torch' has no attribute {name!r}")
