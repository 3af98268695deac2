"""What the server of ranks loads before it forks them: torch, deepspeed with its parts, DeepSpeed's helpers."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from suite_observer import IS_OURS, report_errors, stand_in_for_private_names
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

stand_in_for_private_names()
from unit import common  # noqa: E402


def load_parts() -> None:
    """Load what a rank would load: parts of the drop-in, or what DeepSpeed has compiled on this machine before."""
    if IS_OURS:
        for name in ("comm", "initialize", "ops", "pipe", "utils", "zero"):
            getattr(deepspeed, name)
        return
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import _import_module_from_library, get_default_build_root

    for library in Path(get_default_build_root()).glob("*/*/*.so"):
        if library.stem not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[library.stem] = _import_module_from_library(library.stem, str(library.parent), True)


def let_cpus_take_part() -> None:
    """Take the number of a device off torch's DistributedDataParallel, with which tests compare, on CPUs."""
    build = DistributedDataParallel.__init__

    @wraps(build)
    def without_devices(self: Any, module: Any, *arguments: Any, **named: Any) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            named.pop("device_ids", None)
            named.pop("output_device", None)
        build(self, module, *arguments, **named)

    DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]


def reduce_flags(flag: bool, op: Any) -> Any:
    """Stand for a helper of DeepSpeed's tests that names a device by its number, which a CPU has not."""
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return op(flags)


def give_dropped_attributes() -> None:
    """Give engines what DeepSpeed 0.19.8 has dropped, and what tests only look at, or watch without a call."""
    kind: Any = DeepSpeedEngine
    if not hasattr(kind, "sparse_tensor_module_names"):
        kind.sparse_tensor_module_names = frozenset()
    if IS_OURS:
        kind._get_optimizer_ckpt_name = refuse_call


def refuse_call(*arguments: Any, **named: Any) -> Any:
    """Stand for a private method that a test watches. Raises AssertionError."""
    raise AssertionError("a private method of DeepSpeed's was called")


load_parts()
let_cpus_take_part()
give_dropped_attributes()
common.reduce_boolean_flags = reduce_flags
torch.set_num_threads(1)
common.DistributedExec._dist_run = report_errors(common.DistributedExec._dist_run)
