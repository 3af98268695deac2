"""`deepspeed.checkpointing`: polyaccel's, with the random states of ranks that share a model by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from polyaccel import checkpointing, get_accelerator
from polyaccel.accelerators.named_random import named_random_states
from polyaccel.comm.base import Communicator

MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718
"""DeepSpeed's, between the seed of replicated parameters and that of sharded ones."""
_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group")
_RANKS = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")


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
    """`polyaccel.checkpointing.configure`. Groups of `mpu_` that are not polyaccel's cut nothing."""
    config = None
    if deepspeed_config is not None:
        from polyaccel_deepspeed.config import normalise

        section = normalise(deepspeed_config)[0].get("activation_checkpointing", {})
        config = {"activation_checkpointing": section}
    global _model_rank
    _model_rank = next((int(getattr(mpu_, name)()) for name in _RANKS if hasattr(mpu_, name)), 0)
    checkpointing.configure(
        _ranks_of(mpu_),
        config,
        partition_activations=partition_activations,
        contiguous_checkpointing=contiguous_checkpointing,
        num_checkpoints=num_checkpoints,
        checkpoint_in_cpu=checkpoint_in_cpu,
        synchronize=synchronize,
        profile=profile,
    )


_model_rank = 0
"""This rank among those that share a model, as set by `configure`."""


def _ranks_of(mpu: Any) -> Communicator | None:
    groups = (getattr(mpu, name)() for name in _GROUPS if hasattr(mpu, name))
    return next((group for group in groups if isinstance(group, Communicator)), None)


class CudaRNGStatesTracker:
    """`polyaccel.utils.named_random_states()` by DeepSpeed's names, on any device."""

    def reset(self) -> None:
        """Forget all names."""
        named_random_states().clear()

    def get_states(self) -> dict[str, bytes]:
        """All states, for `set_states`."""
        return named_random_states().states()

    def set_states(self, states: Mapping[str, bytes]) -> None:
        """Continue from `states`."""
        named_random_states().restore(states)

    def add(self, name: str, seed: int) -> None:
        """Separate states from `seed`."""
        named_random_states().add(name, seed)

    def fork(self, name: str = MODEL_PARALLEL) -> AbstractContextManager[None]:
        """Draw from the states `name` inside."""
        return named_random_states().use(name)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The named random states of this process."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed what ranks that share a model draw in common, and what each draws for its part, which `fork()` uses."""
    get_accelerator().manual_seed(seed)
    _TRACKER.reset()
    _TRACKER.add(MODEL_PARALLEL, seed + _OFFSET + _model_rank)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
