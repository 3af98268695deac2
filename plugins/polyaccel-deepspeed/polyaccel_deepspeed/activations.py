"""`deepspeed.checkpointing`, with the arguments that trainers pass although they ask for nothing here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from polyaccel import checkpointing


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`polyaccel.checkpointing.checkpoint`, with arguments by name."""
    return checkpointing.checkpoint(partial(function, **kwargs) if kwargs else function, *args)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose whether the inputs of checkpointed regions wait in host memory.

    The other arguments choose how the same activations are computed again, and have no effect.
    """
    if deepspeed_config is not None:
        from polyaccel_deepspeed.config import normalise

        section = normalise(deepspeed_config)[0].get("activation_checkpointing", {})
        checkpoint_in_cpu = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    checkpointing.configure(checkpoint_in_cpu=bool(checkpoint_in_cpu))
