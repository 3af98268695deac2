"""The one-line questions that scripts ask DeepSpeed's engine, answered from the resolved config and the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyaccel.comm import get_local_rank
from polyaccel.config import ResolvedConfig
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_deepspeed.engine.groups import get_sequence_parallel_group
from polyaccel_deepspeed.experts.layer import MoE


class Getters(TorchEngine):
    """Methods of `DeepSpeedEngine` that answer and change nothing."""

    @property
    def _answers(self) -> ResolvedConfig:
        return self.runtime.config

    # Ranks.

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def global_rank(self) -> int:
        return self.communicator.rank

    @property
    def local_rank(self) -> int:
        return get_local_rank()

    @property
    def dp_world_size(self) -> int:
        return self.mesh.axis_size("data")

    @property
    def mp_world_size(self) -> int:
        return self.mesh.size_of(("tensor",))

    def get_data_parallel_rank(self) -> int:
        return self._place_along("data")

    def get_tensor_parallel_rank(self) -> int:
        return self._place_along("tensor")

    def get_model_parallel_rank(self) -> int:
        return self._place_along("tensor")

    def _place_along(self, axis: str) -> int:
        return self.mesh.coordinates(self.communicator.rank).get(axis, 0)

    # Experts.

    @property
    def num_experts(self) -> list[int]:
        """How many experts each of the model's layers of experts has, on all ranks together."""
        return [module.num_experts for module in self.module.modules() if isinstance(module, MoE)]

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has layers of experts (`deepspeed.moe.layer.MoE`)."""
        return bool(self.num_experts)

    # Batches and steps.

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, micro-batch size of a rank, accumulation steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_mom(self) -> list[Any]:
        """The momentum of every optimizer group: its betas under Adam and its like."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def get_type(self) -> list[Any]:
        """The kind of parameters of every group: weight or bias, where a script has named it `type`."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("type") for group in groups]

    def get_sequence_parallel_group(self) -> Any:
        """torch's group of the ranks that share sequences with this one; None where none do."""
        return get_sequence_parallel_group() if self.mesh.has_several("sequence") else None

    # The config.

    def steps_per_print(self) -> int | None:
        return self._answers.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._answers.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self._answers.memory_breakdown

    def dump_state(self) -> bool:
        return self._answers.dump_state

    def optimizer_name(self) -> str | None:
        return None if self._answers.optimizer is None else self._answers.optimizer.type.lower()

    def optimizer_params(self) -> Mapping[str, Any] | None:
        return None if self._answers.optimizer is None else self._answers.optimizer.params

    def scheduler_name(self) -> str | None:
        return None if self._answers.scheduler is None else self._answers.scheduler.type

    def scheduler_params(self) -> Mapping[str, Any] | None:
        return None if self._answers.scheduler is None else self._answers.scheduler.params

    def fp16_enabled(self) -> bool:
        return self._answers.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self._answers.bf16.enabled

    def amp_enabled(self) -> bool:
        """False: DeepSpeed has removed Apex's mixed precision."""
        return False

    def fp16_auto_cast(self) -> bool:
        return self._answers.fp16.auto_cast

    def torch_autocast_enabled(self) -> bool:
        return self._answers.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._answers.torch_autocast.dtype)
        return dtype

    def loss_scale(self) -> float:
        """The fixed loss scale of the config; 0 for a dynamic one."""
        return self._answers.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return self._answers.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return float(2**self._answers.fp16.initial_scale_power)

    def prescale_gradients(self) -> bool:
        return self._answers.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        return self._answers.gradient_predivide_factor

    def dataloader_drop_last(self) -> bool:
        return self._answers.dataloader_drop_last

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The types of parameters, and of gradients that are accumulated."""
        names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, None: torch.float32}
        model = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        return model, names[self._answers.data_types.grad_accum_dtype]

    # ZeRO.

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    def zero_allow_untested_optimizer(self) -> bool:
        return self._answers.zero_allow_untested_optimizer

    def zero_overlap_comm(self) -> bool | None:
        return self._answers.zero_optimization.overlap_comm

    def zero_reduce_bucket_size(self) -> int:
        return self._answers.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int:
        return self._answers.zero_optimization.allgather_bucket_size

    def zero_prefetch_bucket_size(self) -> int:
        return self._answers.zero_optimization.prefetch_bucket_size

    def zero_param_persistence_threshold(self) -> int:
        return self._answers.zero_optimization.param_persistence_threshold

    def zero_model_persistence_threshold(self) -> int:
        return self._answers.zero_optimization.model_persistence_threshold

    def zero_max_live_parameters(self) -> int:
        return self._answers.zero_optimization.max_live_parameters

    def zero_max_reuse_distance(self) -> int:
        return self._answers.zero_optimization.max_reuse_distance

    def zero_ignore_unused_parameters(self) -> bool:
        return self._answers.zero_optimization.ignore_unused_parameters

    def zero_offload_param(self) -> Any:
        return self._answers.zero_optimization.offload_param

    def zero_offload_optimizer(self) -> Any:
        return self._answers.zero_optimization.offload_optimizer

    def zero_cpu_offload(self) -> bool:
        return self._answers.zero_optimization.offload_optimizer.device == "cpu"

    def zero_reduce_scatter(self) -> bool:
        return True

    def zero_contiguous_gradients(self) -> bool:
        return True
