"""Functions that users of DeepSpeed import from `utils`, and random states by name. Most live in `polyaccel.torch`,
which is loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FRAGMENTS = "polyaccel.torch.api.fragments"
_LEAVES = "polyaccel.torch.sharding.leaf_modules"
_HOMES = {
    "get_z3_leaf_modules": _LEAVES,
    "main_process_first": "polyaccel.comm.api.main_first",
    "see_memory_usage": "polyaccel.observability.stats",
    "named_random_states": "polyaccel.accelerators.named_random",
    "safe_get_full_fp32_param": _FRAGMENTS,
    "safe_get_full_grad": _FRAGMENTS,
    "safe_get_full_optimizer_state": _FRAGMENTS,
    "safe_get_local_fp32_param": _FRAGMENTS,
    "safe_get_local_grad": _FRAGMENTS,
    "safe_get_local_optimizer_state": _FRAGMENTS,
    "safe_set_full_fp32_param": _FRAGMENTS,
    "safe_set_full_grad": _FRAGMENTS,
    "safe_set_full_optimizer_state": _FRAGMENTS,
    "safe_set_local_fp32_param": _FRAGMENTS,
    "safe_set_local_grad": _FRAGMENTS,
    "safe_set_local_optimizer_state": _FRAGMENTS,
    "set_z3_leaf_module": _LEAVES,
    "set_z3_leaf_modules": _LEAVES,
    "set_z3_leaf_modules_by_name": _LEAVES,
    "set_z3_leaf_modules_by_suffix": _LEAVES,
    "unset_z3_leaf_modules": _LEAVES,
    "z3_leaf_module": _LEAVES,
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polyaccel.utils' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
