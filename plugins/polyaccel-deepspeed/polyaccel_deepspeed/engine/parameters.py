"""What DeepSpeed writes on parameters (`ds_id`, `ds_shape`, `ds_status`, ...), for those of an engine of stage 3.

polyaccel's parameters keep their shape and size at every stage, so these are the parameter's own.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from polyaccel.torch.sharding.ownership import record_of

_ids = count()


class ZeroParamStatus(Enum):
    """Whether a parameter has its values on this rank now."""

    AVAILABLE = 1
    """It is whole."""
    NOT_AVAILABLE = 2
    """It is sharded."""
    INFLIGHT = 3
    """It is being gathered; a client never sees it here."""


class ZeroParamType(Enum):
    """Where a parameter stands."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class LiveStatus:
    """`ds_status` of a parameter: equal to the `ZeroParamStatus` that it has at the moment of asking."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = ref(parameter)

    @property
    def now(self) -> ZeroParamStatus:
        parameter = self._parameter()
        home = None if parameter is None else record_of(parameter)
        is_whole = not _awaits_engine(parameter) if home is None else home.is_whole
        return ZeroParamStatus.AVAILABLE if is_whole else ZeroParamStatus.NOT_AVAILABLE

    @property  # type: ignore[misc]
    def __class__(self) -> type[ZeroParamStatus]:  # type: ignore[override]
        """`ZeroParamStatus`, for `isinstance` and `in`."""
        return ZeroParamStatus

    def __eq__(self, other: object) -> bool:
        return self.now is (other.now if isinstance(other, LiveStatus) else other)

    def __hash__(self) -> int:
        return hash(self.now)

    def __repr__(self) -> str:
        return repr(self.now)

    def __reduce__(self) -> tuple[type[ZeroParamStatus], tuple[int]]:
        return ZeroParamStatus, (self.now.value,)  # a copy of the parameter is another one's

    @property
    def name(self) -> str:
        return self.now.name

    _name_ = name
    """Where an enum's `in` looks."""

    @property
    def value(self) -> int:
        return self.now.value


AWAITS_ENGINE = "_polyaccel_awaits_engine"
"""The attribute of a parameter of `zero.Init` that no engine has had: how many contexts gather it now.

It is whole, as its user may not rely on: DeepSpeed shards it at once.
"""


def _awaits_engine(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and vars(parameter).get(AWAITS_ENGINE, 1) == 0


def describe(module: nn.Module, world_size: int) -> None:
    """Write DeepSpeed's attributes on the parameters of `module`, which are sharded over `world_size` ranks."""
    module.ds_external_parameters = _no_parameters  # type: ignore[assignment]
    for parameter in module.parameters():
        vars(parameter).pop(AWAITS_ENGINE, None)
        describe_parameter(parameter, world_size)


def describe_parameter(parameter: nn.Parameter, world_size: int) -> None:
    """Write DeepSpeed's attributes on one parameter. It keeps the `ds_id` that it has: ranks that build the same model
    give the same."""
    if isinstance(parameter, UninitializedParameter):  # it has no shape before the first forward pass
        return
    share = -(-parameter.numel() // world_size)
    attributes: dict[str, Any] = {
        "ds_id": next(_ids) if not hasattr(parameter, "ds_id") else parameter.ds_id,
        "ds_numel": parameter.numel(),
        "ds_shape": parameter.shape,
        "ds_status": LiveStatus(parameter),
        "ds_tensor": _shard(share, parameter.dtype),
        "ds_persist": False,
        "ds_active_sub_modules": set(),
        "partition_numel": partial(int, share),
    }
    for name, value in attributes.items():
        setattr(parameter, name, value)


def _no_parameters() -> tuple[()]:
    """No (name, parameter) that a module uses although another one has it: the engine finds these uses itself."""
    return ()


def _shard(numel: int, dtype: torch.dtype) -> Tensor:
    """A stand-in of a rank's shard, for who asks for its size: it has no values."""
    shard = torch.empty(numel, dtype=dtype, device="meta")
    shard.ds_numel = numel  # type: ignore[attr-defined]
    return shard


class ParameterOffload:
    """`optimizer.parameter_offload`, from which generation code takes DeepSpeed's hooks off and puts them back.

    polyaccel's hooks may stay: under `GatheredParameters` they find every parameter whole and do nothing. So the lists
    are empty, and putting hooks back changes nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def get_param_coordinator(self, training: bool = True) -> ParameterOffload:
        return self

    @property
    def param_coordinator(self) -> ParameterOffload:
        return self

    def is_invalid_trace(self) -> bool:
        """True: there is no trace that would have to be thrown away."""
        return True

    def reset_step(self) -> None:
        """Nothing is recorded here that generation could disturb."""

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing was taken off."""
