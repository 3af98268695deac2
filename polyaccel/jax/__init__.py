"""JAX under the engine. `as_torch`, which makes a function of JAX a layer of torch, loads both when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyaccel.bridge.torch_module_of_jax import as_torch as as_torch

__all__ = ["as_torch"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # not imported here: the room of both frameworks is above this one
        return getattr(import_module("polyaccel.bridge.torch_module_of_jax"), name)
    raise AttributeError(f"module 'polyaccel.jax' has no attribute {name!r}")
