"""`deepspeed.zero`: `Init` with DeepSpeed's positions; `GatheredParameters` that keeps what all ranks wrote in the same
way.

[Note: Weights before engine construction]
A model that was built in `Init` may be loaded by rank 0 alone: `from_pretrained` does so. The engine will take rank 0's
values, but until then other ranks have what the constructors left. So parameters of `Init` get a `ds_id`, a context
with `modifier_rank` notes that rank on them, and in the next context all ranks take over its values. A model that is
not used meanwhile is not copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from polyaccel import comm
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.api import gathered
from polyaccel.torch.deferred_init.init import Init as DeferredInit
from polyaccel.torch.deferred_init.init import is_constructing
from polyaccel.torch.sharding.ownership import record_of
from polyaccel_deepspeed.engine.parameters import AWAITS_ENGINE, describe_parameter
from polyaccel_deepspeed.initialize import init_distributed

_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


class Init(DeferredInit):
    """`polyaccel.zero.Init` by DeepSpeed's arguments, in DeepSpeed's order.

    Where parameters live is set by the config of `deepspeed.initialize`: `remote_device`, `pin_memory`, `mpu` and the
    groups are accepted and mean nothing. A config here decides the dtype of parameters, where `dtype` does not: that of
    its fp16 or bf16. So master weights begin with values of 16 bits, as in DeepSpeed.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        for name, value in (
            ("zero_quantized_weights", zero_quantized_weights),
            ("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights),
        ):
            if value:
                hint = f'write "zero_optimization": {{"{name}": true}}'
                raise ConfigError([Problem(name, value, "is read in the config only", hint)], source="zero.Init")
        dtype = dtype or _dtype_of(config if config_dict_or_path is None else config_dict_or_path)
        super().__init__(module, enabled=enabled, dtype=dtype, mem_efficient_linear=mem_efficient_linear)

    def __enter__(self) -> Init:
        """As polyaccel's, and join all ranks first where nothing has: scripts count on the groups inside."""
        if self._enabled and not comm.is_initialized():
            init_distributed()
        super().__enter__()
        if self._enabled:
            self.callback(register_module_parameter_registration_hook(_describe_new).remove)
            self.callback(register_module_module_registration_hook(_describe_replaced).remove)
        return self


def _dtype_of(source: Any) -> torch.dtype | None:
    """The 16-bit type that a config enables, by its dict or the path of its file."""
    if isinstance(source, str | PathLike) and Path(source).is_file():
        source = json.loads(Path(source).read_text(encoding="utf-8"))
    if not isinstance(source, Mapping):
        return None
    for name, dtype in _DTYPES.items():
        section = source.get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return None


def _describe_new(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        if not hasattr(parameter, "ds_id") and record_of(parameter) is None:
            vars(parameter)[AWAITS_ENGINE] = 0
        describe_parameter(parameter, dist.get_world_size() if dist.is_initialized() else 1)


def _describe_replaced(module: nn.Module, name: str, part: nn.Module | None) -> None:
    """Describe the parameters that a part got past its registration, as `skip_init` puts them in by `to_empty`."""
    for parameter in () if part is None else part.parameters():
        if not hasattr(parameter, "ds_id"):
            _describe_new(module, name, parameter)


class GatheredParameters(gathered.GatheredParameters):
    """`polyaccel.zero.GatheredParameters`, that also takes over what was written without a `modifier_rank`.

    Trainers do that, the same on every rank. What every rank wrote to is taken from rank 0; a parameter that only some
    ranks wrote to stays the error that it is in polyaccel. Parameters of `Init` that no engine has yet are whole
    already, and inside they are the same on all ranks: [Note: Weights before engine construction].
    """

    def __enter__(self) -> None:
        if not is_constructing():
            for parameter in self._without_engine():
                writer = vars(parameter).pop(_WRITER, None)
                if writer is not None and dist.is_initialized() and dist.get_world_size() > 1:
                    _take_over(parameter, writer)
        super().__enter__()
        self._count(1)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._count(-1)
        super().__exit__(kind, error, trace)
        if kind is None and self._modifier_rank is not None:
            for parameter in self._without_engine():
                vars(parameter)[_WRITER] = self._modifier_rank

    def _count(self, change: int) -> None:
        """Count this context on the parameters that no engine has had, whose `ds_status` asks."""
        for parameter in self._params:
            if AWAITS_ENGINE in vars(parameter):
                vars(parameter)[AWAITS_ENGINE] += change

    def _without_engine(self) -> list[nn.Parameter]:
        """The parameters of `Init` that no engine has yet, in the order of their making, which is all ranks'."""
        found = {
            parameter for parameter in self._params if hasattr(parameter, "ds_id") and record_of(parameter) is None
        }
        return sorted(found, key=lambda parameter: parameter.ds_id)

    def _write_back(self, opening: Any) -> None:
        if self._modifier_rank is not None:
            super()._write_back(opening)
            return
        changes = opening.owner.step.communicator.all_gather_object(sorted(set(opening.changed()) & set(opening.fqns)))
        if not changes[0] or any(names != changes[0] for names in changes):
            super()._write_back(opening)
            return
        self._modifier_rank = 0
        try:
            super()._write_back(opening)
        finally:
            self._modifier_rank = None


_WRITER = "_polyaccel_writer"
"""The attribute of a parameter whose values are right on that rank only."""


def _take_over(parameter: nn.Parameter, writer: int) -> None:
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    value.copy_(parameter.detach())  # a clone of what is not computed yet would be computed later, too
    dist.broadcast(value, writer)
    if dist.get_rank() != writer:
        with torch.no_grad():
            parameter.copy_(value)


# transformers replaces this function around every `from_pretrained` under stage 3, to keep the types of `arange`.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype, target_device: Any = None
) -> Callable[..., Any]:
    """`fn` itself: polyaccel's `Init` replaces no constructor of tensors."""
    return fn
