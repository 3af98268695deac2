"""The config of DeepSpeed's engine in addition to `Getters`: keys as they were resolved, and fixed answers for what
does not exist here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from polyaccel_deepspeed.engine.getters import Getters

_OF_ZERO = {
    "zero_compute_grad_norm": "compute_grad_norm",
    "zero_hpz_partition_size": "zero_hpz_partition_size",
    "zero_log_trace_cache_warnings": "log_trace_cache_warnings",
    "zero_module_granularity_threshold": "module_granularity_threshold",
    "zero_parameter_alignment": "parameter_alignment",
    "zero_quantized_gradients": "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_quantized_weights",
    "is_sanity_checks_enabled": "enable_sanity_checks",
}
"""Methods, and the keys of `zero_optimization` that they answer with."""
_WITHOUT_EFFECT = {
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
    "super_offload": ("zero_optimization.offload_optimizer.super_offload", False),
    "cpuadam_cores_perc": ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.8),
    "zero_allgather_partitions": ("zero_optimization.allgather_partitions", True),
    "zero_allgather_sequential": ("zero_optimization.stage3_allgather_sequential", False),
    "zero_elastic_checkpoint": ("zero_optimization.elastic_checkpoint", False),
    "zero_multi_rank_bucket_allreduce": ("zero_optimization.use_multi_rank_bucket_allreduce", True),
    "zero_round_robin_gradients": ("zero_optimization.round_robin_gradients", False),
    "zero_sub_group_size": ("zero_optimization.sub_group_size", 1_000_000_000),
    "checkpoint_serialization_enabled": ("checkpoint.checkpoint_serialization", True),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "aio_config": ("aio", {}),
    "data_efficiency_config": ("data_efficiency", {}),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "data_sampling_config": ("data_efficiency.data_sampling", {}),
    "data_sampling_enabled": ("data_efficiency.data_sampling.enabled", False),
    "curriculum_learning_config": ("data_efficiency.data_sampling.curriculum_learning", {}),
    "curriculum_learning_enabled": ("data_efficiency.data_sampling.curriculum_learning.enabled", False),
    "random_ltd_config": ("data_efficiency.data_routing.random_ltd", {}),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "tensor_parallel_config": ("tensor_parallel", {}),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
}
"""Methods that answer with a key of the config as its user wrote it, or with DeepSpeed's default."""
_FIXED: dict[str, Any] = {
    "checkpoint_writer_enabled": False,
    "compile_autosp": False,
    "compile_autotp": False,
    "is_deepcompile_active": False,
    "is_deepcompile_enabled": False,
    "optimizer_legacy_fusion": False,
    "use_node_local_storage": False,
    "uses_parallelization_pass_only": False,
    "zenflow_config": None,
    "zero_legacy_stage1": False,
    "zero_load_from_fp32_weights": True,
    "zero_save_muon_momentum_buffer_in_memory": False,
}
"""Methods whose answer is the same under every config that polyaccel takes."""


class Settings(Getters):
    """Methods of `DeepSpeedEngine` that answer from the config; most are made from the tables above."""

    raw_config: Mapping[str, Any] = {}

    def autotp_size(self) -> int:
        """How many ranks share the weights of a layer; 0 where they are not cut, and the config has no 1 either."""
        ranks = self._answers.mesh.tensor
        return ranks if ranks > 1 else self._answers.tensor_parallel.autotp_size

    def autotuning_enabled(self) -> bool:
        return self._answers.autotuning.enabled

    def zero_partial_offload(self) -> float:
        """The share of the optimizer's states that is offloaded."""
        return self._answers.zero_optimization.offload_optimizer.ratio

    def zero_use_cpu_optimizer(self) -> bool:
        return self._answers.zero_optimization.offload_optimizer.device in ("cpu", "nvme")

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._answers.zero_optimization.offload_optimizer.device == "nvme"

    def zero_force_ds_cpu_optimizer(self) -> bool:
        return self._answers.zero_force_ds_cpu_optimizer

    def is_first_weights_partition_group(self) -> bool:
        return self.zero_optimization_partition_weights()

    def postscale_gradients(self) -> bool:
        return not self.prescale_gradients()

    def log_level(self) -> str | None:
        return self._answers.log_level

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._answers.checkpoint.tag_validation.lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._answers.checkpoint.tag_validation.lower() == "fail"

    @property
    def communication_data_type(self) -> torch.dtype:
        """The type in which gradients travel."""
        asked = self._answers.communication_data_type
        return self.get_data_types()[0] if asked is None else _DTYPES[asked]

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """The config's numbers for a dynamic loss scale; None for a fixed one."""
        fp16 = self._answers.fp16
        if not self.dynamic_loss_scale():
            return None
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _of_zero(key: str) -> Callable[[Settings], Any]:
    def answer(self: Settings) -> Any:
        return getattr(self._answers.zero_optimization, key)

    return answer


def _as_written(key: str, default: Any) -> Callable[[Settings], Any]:
    def answer(self: Settings) -> Any:
        value: Any = self.raw_config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    return answer


def _fixed(value: Any) -> Callable[[Settings], Any]:
    def answer(self: Settings) -> Any:
        return value

    return answer


def _add(name: str, method: Callable[[Settings], Any]) -> None:
    method.__name__, method.__qualname__ = name, f"Settings.{name}"
    setattr(Settings, name, method)


for _name, _key in _OF_ZERO.items():
    _add(_name, _of_zero(_key))
for _name, (_key, _default) in _WITHOUT_EFFECT.items():
    _add(_name, _as_written(_key, _default))
for _name, _value in _FIXED.items():
    _add(_name, _fixed(_value))
