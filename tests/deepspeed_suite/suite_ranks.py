"""What the server of ranks loads before it forks them: torch, deepspeed with its parts, DeepSpeed's helpers."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
from suite_observer import IS_OURS, report_errors, stand_in_for_private_names

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


load_parts()
torch.set_num_threads(1)
common.DistributedExec._dist_run = report_errors(common.DistributedExec._dist_run)
