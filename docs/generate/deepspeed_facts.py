"""The public names of DeepSpeed and their arguments, read from an installed one.

`python docs/generate/deepspeed_facts.py`, in an environment that has DeepSpeed and not the drop-in, prints what
`tests/unit/dropin/deepspeed_facts.json` holds: names, parameters, defaults and config keys, and no code. A name is
public in a package that collects names for users (`FACADES`), and in the module that defines it. Without such an
environment, `python docs/generate/deepspeed_names.py FOLDER FACTS` renews all but the names of facades and members.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from deepspeed_names import facts_of

FACADES = (
    "deepspeed",
    "deepspeed.accelerator",
    "deepspeed.checkpointing",
    "deepspeed.comm",
    "deepspeed.compression.helper",
    "deepspeed.linear",
    "deepspeed.ops.adagrad",
    "deepspeed.ops.adam",
    "deepspeed.ops.aio",
    "deepspeed.ops.lamb",
    "deepspeed.ops.lion",
    "deepspeed.ops.op_builder",
    "deepspeed.ops.transformer",
    "deepspeed.pipe",
    "deepspeed.profiling.flops_profiler",
    "deepspeed.runtime.zero",
    "deepspeed.sequence",
    "deepspeed.utils",
    "deepspeed.zero",
)
HOMES = (
    "deepspeed.accelerator.abstract_accelerator",
    "deepspeed.accelerator.real_accelerator",
    "deepspeed.checkpoint.utils",
    "deepspeed.comm.comm",
    "deepspeed.launcher.runner",
    "deepspeed.linear.config",
    "deepspeed.linear.context_manager",
    "deepspeed.linear.optimized_linear",
    "deepspeed.linear.quantization",
    "deepspeed.moe.experts",
    "deepspeed.moe.layer",
    "deepspeed.moe.sharded_moe",
    "deepspeed.moe.utils",
    "deepspeed.monitor.monitor",
    "deepspeed.ops.adagrad.cpu_adagrad",
    "deepspeed.ops.adam.cpu_adam",
    "deepspeed.ops.adam.fused_adam",
    "deepspeed.ops.lamb.fused_lamb",
    "deepspeed.ops.lion.cpu_lion",
    "deepspeed.ops.lion.fused_lion",
    "deepspeed.profiling.flops_profiler.profiler",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.base_optimizer",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.config",
    "deepspeed.runtime.config_utils",
    "deepspeed.runtime.dataloader",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "deepspeed.runtime.hybrid_engine",
    "deepspeed.runtime.lr_schedules",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.pipe.module",
    "deepspeed.runtime.pipe.topology",
    "deepspeed.runtime.precision_config",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.runtime.swap_tensor",
    "deepspeed.runtime.utils",
    "deepspeed.runtime.zero.config",
    "deepspeed.runtime.zero.leaf_module_config",
    "deepspeed.runtime.zero.offload_config",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.tiling",
    "deepspeed.sequence.layer",
    "deepspeed.utils.groups",
    "deepspeed.utils.init_on_device",
    "deepspeed.utils.logging",
    "deepspeed.utils.module_utils",
    "deepspeed.utils.nvtx",
    "deepspeed.utils.tensor_fragment",
    "deepspeed.utils.z3_leaf_module",
    "deepspeed.utils.zero_to_fp32",
)
CLASSES = (
    "deepspeed.DeepSpeedEngine",
    "deepspeed.accelerator.DeepSpeedAccelerator",
)
ALSO = {
    "deepspeed": ("dist", "get_accelerator", "logger"),
    "deepspeed.comm": ("P2POp", "ProcessGroup", "ReduceOp"),
    "deepspeed.comm.comm": ("P2POp", "ProcessGroup", "ReduceOp"),
    "deepspeed.launcher.runner": ("DEEPSPEED_ENVIRONMENT_NAME",),
    "deepspeed.runtime.lr_schedules": ("VALID_LR_SCHEDULES",),
    "deepspeed.utils": ("logger",),
    "deepspeed.utils.logging": ("logger",),
    "deepspeed.DeepSpeedEngine": ("_consolidated_16bit_state_dict", "_zero3_consolidated_16bit_state_dict"),
    "deepspeed.runtime.zero.partition_parameters": ("_orig_torch_arange", "get_accelerator"),
    "deepspeed.utils.groups": (
        "_get_data_parallel_group",
        "_get_data_parallel_rank",
        "_get_data_parallel_world_size",
        *(
            f"_get_expert_{kind}parallel_{what}"
            for kind in ("", "data_")
            for what in ("group", "group_dict", "group_ranks", "rank", "world_size")
        ),
        "_get_max_expert_parallel_group",
        "_get_max_expert_size",
        "_get_max_expert_size_name",
        "_get_model_parallel_world_size",
        "_get_sequence_parallel_group",
        "_get_sequence_parallel_rank",
        "_get_sequence_parallel_world_size",
    ),
}
"""Names that clients use although they begin with an underscore, are constants or come from another package."""


def facts() -> dict[str, Any]:
    """All of it, as JSON has it."""
    version = importlib.import_module("deepspeed").__version__
    return {
        "version": version,
        "modules": {name: _names(name) for name in sorted({*FACADES, *HOMES})},
        "members": {name: _members(name) for name in CLASSES},
        **facts_of(Path(str(importlib.import_module("deepspeed").__file__)).parent),
    }


def _found(path: str) -> Any:
    """The module or class at `path`: a module that is one for `import`, or what stands under that name."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        pass
    value: Any = importlib.import_module("deepspeed")
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    return value


def _names(path: str) -> dict[str, str]:
    module = _found(path)
    return {
        name: arguments(value)
        for name in sorted(dir(module))
        if _is_public(name, value := getattr(module, name, None), module, path)
    }


def _is_public(name: str, value: Any, module: ModuleType, path: str) -> bool:
    if name in ALSO.get(path, ()):
        return True
    if name.startswith("_") or not isinstance(value, (type, FunctionType)):
        return False
    home = getattr(value, "__module__", "") or ""
    return home.partition(".")[0] in ("deepspeed", "op_builder") if path in FACADES else home == module.__name__


def _members(path: str) -> dict[str, str]:
    return {
        name: arguments(value)
        for name, value in sorted(vars(_found(path)).items())
        if not name.startswith("_") or name in ALSO.get(path, ())
    }


def arguments(value: Any) -> str:
    """`a b=1 *rest named=None`; empty for what cannot be called. Defaults that are no plain values are `...`."""
    value = getattr(value, "__func__", value)
    if not callable(value) or (
        isinstance(value, type) and (getattr(value, "__init__", None) is object.__init__ or issubclass(value, Enum))
    ):
        return ""
    if not isinstance(value, (type, FunctionType, MethodType)):
        return ""
    return _arguments_of(_unwrapped(value))


def _arguments_of(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    return " ".join(map(_argument, signature.parameters.values()))


def _unwrapped(value: Any) -> Any:
    """The function in a wrapper that does not tell: one that takes anything and closes over a function."""
    closed = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    named = [one for one in closed if isinstance(one, FunctionType)]
    takes_anything = isinstance(value, FunctionType) and _arguments_of(value) == "*args **kwargs"
    return named[0] if takes_anything and named else value


def _argument(one: inspect.Parameter) -> str:
    stars = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD)
    if one.default is one.empty:
        return f"{stars}{one.name}"
    plain = one.default is None or type(one.default) in (bool, int, float, str)
    return f"{one.name}={one.default!r}".replace(" ", "") if plain else f"{one.name}=..."


if __name__ == "__main__":
    json.dump(facts(), sys.stdout, indent=1)
    print()
