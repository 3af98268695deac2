"""`deepspeed.runtime.utils.clip_grad_norm_`: gradients that a script clips by itself, before any engine has them."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor

from polyaccel_deepspeed import comm
from polyaccel_deepspeed.engine.groups import _get_data_parallel_group, is_model_parallel_parameter

_EPS = 1e-6


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Any:
    """Scale gradients down to a norm: that of the model, as the mean over the data-parallel ranks. Collective.

    Args:
        parameters: Parameters; those without a gradient are passed over.
        max_norm: The largest norm that stays.
        norm_type: The norm's power, or infinity.
        mpu: Megatron's object, whose model-parallel ranks have parts of the model; None where each has all.

    Returns:
        The norm before, as a tensor.
    """
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    clipped = [parameter for parameter in given if parameter.grad is not None]
    counted = [parameter.grad for parameter in clipped if _counts(parameter, norm_type, mpu)]
    norms = [gradient.detach().float().norm(norm_type) for gradient in counted if gradient is not None]
    power = torch.stack(norms) if norms else torch.zeros(1)
    if norm_type == inf:
        norm, op = power.max(), comm.ReduceOp.MAX
    else:
        norm, op = power.pow(norm_type).sum(), comm.ReduceOp.SUM
    if mpu is not None:
        comm.all_reduce(norm, op=op, group=mpu.get_model_parallel_group())
    if norm_type != inf:
        norm = norm.pow(1.0 / norm_type)
    group = _get_data_parallel_group()
    norm = norm / comm.get_world_size(group=group)
    comm.all_reduce(norm, group=group)
    scale = torch.clamp(max_norm / (norm + _EPS), max=1.0)
    for gradient in [parameter.grad for parameter in clipped]:
        assert gradient is not None
        gradient.mul_(scale.to(gradient.device))
    return norm


def _counts(parameter: Tensor, norm_type: float, mpu: Any) -> bool:
    """Tell whether this rank counts a parameter: one that all model-parallel ranks have is counted by the first."""
    is_own = mpu is None or norm_type == inf or mpu.get_model_parallel_rank() == 0
    return is_own or is_model_parallel_parameter(parameter)
