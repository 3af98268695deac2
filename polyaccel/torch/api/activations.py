"""Activation checkpointing by DeepSpeed's names, for regions that a model marks itself. The work is done by
`polyaccel.torch.activation_checkpointing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyaccel.accelerators import get_accelerator
from polyaccel.comm.base import Communicator
from polyaccel.config import load_config
from polyaccel.engine.policies.modules import recompute_policy_of
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.activation_checkpointing.regions import PLAIN, RecomputedRegions, configured, present_regions

_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group")
"""Methods of an `mpu` that return the ranks that share a model."""


def checkpoint(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`function(*args, **named)`, whose activations are computed again in backward instead of kept.

    Tensors among the arguments are kept until then, where the config, or `configure`, says. Random numbers come out
    alike both times, named ones too (`polyaccel.utils.named_random_states`). Nested use and use without gradients are
    fine.
    """
    return present_regions().run(function, args, named, PLAIN)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`checkpoint`, which is never reentrant here; the name is DeepSpeed's."""
    return checkpoint(function, *args, **named)


def configure(
    mpu_: Any = None,
    deepspeed_config: str | Path | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say for the whole process how `checkpoint` works; goes before what engines' configs say.

    Where an argument is None, `deepspeed_config` decides. `mpu_` names the ranks that share a model, over which
    `partition_activations` cuts: a communicator, or an object of Megatron's shape whose
    `get_tensor_model_parallel_group` or `get_model_parallel_group` returns one. Raises ConfigError for another object,
    and for contiguous memory without a number of checkpoints.
    """
    policy = recompute_policy_of(load_config(deepspeed_config or {}))
    asked: dict[str, bool | None] = {
        "partition": partition_activations,
        "offload": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    stated: dict[str, Any] = {name: bool(value) for name, value in asked.items() if value is not None}
    policy = replace(policy, **stated)
    if contiguous_checkpointing is False:
        policy = replace(policy, number=None)
    elif contiguous_checkpointing or policy.number is not None:
        policy = replace(policy, number=num_checkpoints or policy.number)
    if contiguous_checkpointing and policy.number is None:
        raise _refused("num_checkpoints", num_checkpoints, "is needed for contiguous_checkpointing", "state a number")
    configured()[:] = [RecomputedRegions(policy, get_accelerator(), _ranks_of(mpu_))]


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(configured())


def reset() -> None:
    """Forget what `configure` said: engines' configs decide again."""
    configured().clear()


def _ranks_of(mpu: Any) -> Communicator | None:
    if mpu is None or isinstance(mpu, Communicator):
        return mpu
    for name in _GROUPS:
        if callable(method := getattr(mpu, name, None)):
            group = method()
            if group is None or isinstance(group, Communicator):
                return group
            mpu = group
            break
    raise _refused(
        "mpu_", type(mpu).__name__, "is no communicator of polyaccel", "make groups with polyaccel.comm.new_group"
    )


def _refused(key: str, value: Any, expected: str, hint: str) -> ConfigError:
    return ConfigError([Problem(key, value, expected, hint)], source="checkpointing.configure")
