"""Attributes of DeepSpeed's engine that are neither a method nor a number of its config."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_deepspeed import to_come
from polyaccel_deepspeed.engine import groups
from polyaccel_deepspeed.engine.timers import SynchronizedWallClockTimer
from polyaccel_deepspeed.experts.gates import TopKGate
from polyaccel_deepspeed.experts.layer import MOELayer


class CheckpointEngine:
    """`engine.checkpoint_engine`: files of a script's own next to the engine's checkpoints."""

    name = "polyaccel"

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine

    def create(self, info: Any) -> None:
        """Do nothing: a checkpoint begins with its first file."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        import os

        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a state dict by `torch.save`."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read tensors and plain values that `save` wrote; classes are refused."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: Any) -> bool:
        """Wait until the engine's last checkpoint is complete."""
        self._engine.wait_for_checkpoint()
        return True

    def wait(self) -> None:
        """Wait until the engine's last checkpoint is complete."""
        self._engine.wait_for_checkpoint()

    def is_decoupled(self) -> bool:
        """Return whether checkpoints are written while training continues."""
        return self._engine.runtime.config.checkpoint.in_background

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return True: every rank writes its own part."""
        return True

    def cleanup(self) -> None:
        """Wait until the engine's last checkpoint is complete."""
        self._engine.wait_for_checkpoint()


class Attributes(TorchEngine):
    """Attributes that scripts read. Groups are those of the last engine that was made, as in DeepSpeed."""

    client_optimizer: Any = None
    """What `initialize` was given as `optimizer`."""
    client_lr_scheduler: Any = None
    """What `initialize` was given as `lr_scheduler`."""
    training_data: Any = None
    """What `initialize` was given as `training_data`."""
    pipeline_parallelism = False
    """Whether the model is a pipeline."""
    enable_backward_allreduce = True
    """Whether backward passes reduce gradients."""
    dont_change_device = use_ds_comm = False
    mesh_device = all_to_all_group = local_all_to_all_group = None
    autotuning_model_info: dict[str, Any] | None = None

    # The model.

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer inside of the engine's."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The names of the module's parameters."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def gate_modules(self) -> list[nn.Module]:
        """The gates of the model's layers of experts."""
        return [one for one in self.module.modules() if isinstance(one, TopKGate)]

    @property
    def moe_layers(self) -> list[nn.Module]:
        """The model's layers of experts."""
        return [one for one in self.module.modules() if isinstance(one, MOELayer)]

    # The step.

    @property
    def losses(self) -> torch.Tensor | None:
        """The mean of the losses since the last step; None before the first of them."""
        return torch.stack([loss.float() for loss in self._losses]).mean() if self._losses else None

    @property
    def gas_boundary_ctr(self) -> int:
        """How many accumulations have ended."""
        return self.global_steps

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are means over the ranks."""
        return self.runtime.config.gradient_allreduce_op == "mean"

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether `no_sync` is in force."""
        return not self._passes.reduce

    @cached_property
    def timers(self) -> SynchronizedWallClockTimer:
        """Clocks for the script's own use."""
        return SynchronizedWallClockTimer()

    def get_wall_clock_timers(self) -> dict[str, Any]:
        """Return the script's clocks by name, in milliseconds."""
        return {name: clock.elapsed(reset=False) for name, clock in self.timers.get_timers().items()}

    @cached_property
    def flops_profiler(self) -> Any:
        """The counter of operations: not started, and after the step that the config profiles, with its totals."""
        from polyaccel_deepspeed.engine.profiling import EngineProfiler

        return EngineProfiler(self)

    @cached_property
    def checkpoint_engine(self) -> CheckpointEngine:
        """Files of the script's own, and the wait for checkpoints."""
        return CheckpointEngine(self)

    @property
    def save_zero_checkpoint(self) -> bool:
        """Whether this rank writes a part of a checkpoint: every rank does."""
        return True

    @property
    def save_non_zero_checkpoint(self) -> bool:
        """Whether this rank is the first of those that share its part of the model."""
        return groups.get_data_parallel_rank() == 0

    # Ranks.

    @property
    def dist_backend(self) -> str | None:
        """The name of the device's backend of collectives."""
        return self.accelerator.capabilities().default_comm

    @property
    def checkpoint_mp_rank(self) -> int:
        """The place of this rank among those that share layers."""
        return self.mesh.coordinates(self.communicator.rank).get("tensor", 0)

    @property
    def data_parallel_group(self) -> Any:
        """torch's group of the ranks with other batches."""
        return groups.get_data_parallel_group()

    @property
    def seq_data_parallel_group(self) -> Any:
        """torch's group of the ranks with other tokens: of other batches, or of other parts of a sequence."""
        return groups.get_sequence_data_parallel_group()

    @property
    def seq_dp_world_size(self) -> int:
        """How many ranks have other tokens."""
        return self.mesh.size_of(("data", "sequence"))

    @property
    def seq_parallel_group(self) -> Any:
        """torch's group of the ranks that share sequences; None where none do."""
        return groups.get_sequence_parallel_group() if self.sequence_parallel_size > 1 else None

    @property
    def sequence_parallel_size(self) -> int:
        """How many ranks share each sequence."""
        return self.mesh.size_of(("sequence",))

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """torch's groups of the ranks that share experts, by name."""
        return groups._get_expert_parallel_group_dict()

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """torch's groups of the ranks with the same experts and other batches, by name."""
        return groups._get_expert_data_parallel_group_dict()


ABSENT_ATTRIBUTES = {
    "engine_timers": "engine.timers has clocks, and engine.metrics the phases of a step",
    "engine_timers_cache": "DeepSpeed's own",
    "first_dataloader_check": "DeepSpeed's own",
    "flatten": "torch._utils has the function",
    "unflatten": "torch._utils has the function",
    "flops": "engine.flops_profiler counts",
    "fwd_duration": "engine.metrics has the phases of a step",
    "loaded_checkpoint_dp_world_size": "checkpoints load at any number of ranks",
    "loaded_checkpoint_mp_world_size": "checkpoints load at any number of ranks",
    "module_forward_post_hook": "DeepSpeed's own",
    "module_forward_pre_hook": "DeepSpeed's own",
    "optimized_linear_base_weight_sharding": "deepspeed.linear's layers are units of ZeRO",
    "optimized_linear_lora_enabled": "deepspeed.linear's layers are units of ZeRO",
    "random_ltd_scheduler": "engine.token_drop.tokens is the number of tokens; checkpoints need no more",
    "scale_wrt_gas": "an argument of engine.backward",
    "summary_events": "engine.monitor writes events",
    "torch_autocast_z0_gradscaler": "engine.loss_scaler scales at every stage",
    "update_interval": to_come.ZENFLOW,
    "warn_unscaled_loss": "DeepSpeed's own",
}
"""Attributes that the engine does not have, and why."""
