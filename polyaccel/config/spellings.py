"""Other spellings of keys: those of older DeepSpeed versions, and DeepSpeed's keys for the axes of the mesh.

They are moved to their one place before the config is typed, so that nothing else reads them.
"""

from __future__ import annotations

import logging
from typing import Any

from polyaccel.config.keys import json_name, parent_of, value_of
from polyaccel.config.sections.zero import ZeroConfig
from polyaccel.errors import Problem

_logger = logging.getLogger(__name__)

MESH_SPELLINGS: dict[str, tuple[str, ...]] = {
    "pipe": ("pipeline.stages",),
    "data": ("data_parallel_size",),
    "expert": ("expert_parallel.autoep_size",),
    "sequence": ("sequence_parallel_size",),
    "tensor": ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
}
"""The other keys for the ranks along an axis: the key `mesh.<axis>` gets their value. A size of 1 states nothing, nor
does null for `data`."""
_SWITCHES = {"expert_parallel.autoep_size": "expert_parallel.enabled"}
"""Keys that count only where another one is true."""


def respell_mesh(tree: dict[str, Any]) -> tuple[dict[str, str], list[Problem]]:
    """Move axes' sizes into `mesh`; return the other key that was used, and contradictions."""
    written: dict[str, str] = {}
    problems: list[Problem] = []
    mesh = tree.get("mesh", {})
    if not isinstance(mesh, dict):
        return written, problems
    for axis, keys in MESH_SPELLINGS.items():
        for key in keys:
            switch = _SWITCHES.get(key)
            if switch is not None and value_of(tree, switch) is not True:
                continue
            table, name = parent_of(tree, key)
            size, known = table.get(name), mesh.get(axis)
            if not _states_size(axis, size):
                continue
            del table[name]
            if not _states_size(axis, known):
                mesh[axis], written[axis] = size, key
            elif known != size:
                first = written.get(axis, f"mesh.{axis}")
                problems.append(Problem(key, size, f"contradicts {first} = {known}", "give one of the two"))
    if mesh:
        tree["mesh"] = mesh
    return written, problems


def _states_size(axis: str, size: Any) -> bool:
    """Whether `size` is one that an axis can have. Validation refuses every other value under the key itself."""
    is_whole = not isinstance(size, bool) and (isinstance(size, int) or (isinstance(size, float) and size.is_integer()))
    return is_whole and size >= (1 if axis == "data" else 2)


def migrate_deprecated(tree: dict[str, Any]) -> list[Problem]:
    """Rename deprecated keys in place with logged warnings; return problems."""
    problems: list[Problem] = []
    _rename(tree, "bfloat16", "bf16", "", problems)
    zero = tree.get("zero_optimization")
    if isinstance(zero, bool):
        _warn("zero_optimization", f'"zero_optimization": {{"stage": {int(zero)}}}')
        zero = tree["zero_optimization"] = {"stage": int(zero)}
    if isinstance(zero, dict):
        _modernise_zero(zero, problems)
    return problems


def _modernise_zero(zero: dict[str, Any], problems: list[Problem]) -> None:
    prefix = "zero_optimization."
    _rename(
        zero,
        "stage3_gather_fp16_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        prefix,
        problems,
    )
    for name, field in ZeroConfig.model_fields.items():
        if json_name(name, field) != name and name in zero:
            _rename(zero, name, json_name(name, field), prefix, problems, deprecated=False)
    for old, section in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if isinstance(zero.get(old), bool):
            _set_device(zero, old, section, problems)
    if "cpu_offload_use_pin_memory" in zero:
        pinned = zero.pop("cpu_offload_use_pin_memory")
        _warn(f"{prefix}cpu_offload_use_pin_memory", "pin_memory in offload_optimizer and offload_param")
        for section in ("offload_optimizer", "offload_param"):
            if isinstance(zero.get(section), dict):
                zero[section].setdefault("pin_memory", pinned)


def _set_device(zero: dict[str, Any], old: str, section: str, problems: list[Problem]) -> None:
    device = "cpu" if zero.pop(old) else "none"
    new = f"zero_optimization.{section}.device"
    _warn(f"zero_optimization.{old}", f"{new} = {device!r}")
    table = zero.setdefault(section, {})
    if isinstance(table, dict) and table.setdefault("device", device) != device:
        problems.append(Problem(f"zero_optimization.{old}", device == "cpu", f"contradicts {new}", f"keep only {new}"))


def _rename(
    table: dict[str, Any], old: str, new: str, prefix: str, problems: list[Problem], *, deprecated: bool = True
) -> None:
    if old not in table:
        return
    value = table.pop(old)
    if new in table:
        problems.append(
            Problem(prefix + old, value, f"is another name of {prefix + new}, which is there too", "keep one")
        )
        return
    if deprecated:
        _warn(prefix + old, prefix + new)
    table[new] = value


def _warn(old: str, new: str) -> None:
    _logger.warning("config key %s is deprecated; it was read as %s", old, new)
