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
    """Run `function`, and compute its activations again in the backward pass instead of keeping them.

    Its tensor arguments are kept until then, where the config, or `configure`, places them. Random numbers are the same
    both times, named ones too (`polyaccel.utils.named_random_states`). Nested use, and use without gradients, are
    allowed. The name is Megatron's and DeepSpeed's.

    Args:
        function: Part of a model's forward pass.
        *args: Its arguments.
        **named: Its named arguments.

    Returns:
        Result of `function(*args, **named)`.

    Example:
        ```python
        for block in self.blocks:
            hidden = polyaccel.checkpointing.checkpoint(block, hidden)
        ```
    """
    return present_regions().run(function, args, named, PLAIN)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run `checkpoint`, which is never reentrant here. The name is DeepSpeed's.

    Args:
        function: As in `checkpoint`.
        *args: Its arguments.
        **named: Its named arguments.

    Returns:
        Result of `function(*args, **named)`.
    """
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
    """Set for the whole process how `checkpoint` works. It overrides the configs of engines. DeepSpeed's arguments.

    Args:
        mpu_: Ranks that share a model, over which `partition_activations` shards: a communicator, or an object of
            Megatron's shape whose `get_tensor_model_parallel_group` or `get_model_parallel_group` returns one.
        deepspeed_config: Config whose section `activation_checkpointing` decides where an argument is None.
        partition_activations: Shard kept tensors over the ranks of `mpu_`.
        contiguous_checkpointing: Keep tensors in contiguous memory, which needs `num_checkpoints`.
        num_checkpoints: Regions that the contiguous memory is for.
        checkpoint_in_cpu: Keep tensors in host memory.
        synchronize: Synchronise the device at each region.
        profile: Time each region.

    Raises:
        ConfigError: `mpu_` is another object, the config is wrong, or the number of checkpoints is missing.
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
    """Return whether `configure` was called."""
    return bool(configured())


def reset() -> None:
    """Undo `configure`: the configs of engines decide again."""
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
        "mpu_", type(mpu).__name__, "is not a communicator of polyaccel", "make groups with polyaccel.comm.new_group"
    )


def _refused(key: str, value: Any, expected: str, hint: str) -> ConfigError:
    return ConfigError([Problem(key, value, expected, hint)], source="checkpointing.configure")
