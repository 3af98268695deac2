"""`deepspeed.runtime.zero.offload_config`: where states go, and the kinds of them that `offload_states` takes."""

from __future__ import annotations

from enum import Enum

MIN_SWAPPABLE_BYTES = 1 << 20
"""Smaller tensors stay in memory in DeepSpeed; here every state of `offload_optimizer` goes where it is sent."""


class OffloadDeviceEnum(str, Enum):
    """Devices of `offload_param` and `offload_optimizer`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of `include` of `offload_states`, by DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
