"""Sections of a config as objects, which scripts build and put into one by `model_dump(exclude_unset=True)`.

Their fields, defaults and bounds are DeepSpeed's. Whether polyaccel trains with a value is for `DeepSpeedConfig` and
`initialize` to say.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from polyaccel.config.sections.zero import LeafModuleConfig
from polyaccel_deepspeed.config import ZeroStageEnum
from polyaccel_deepspeed.offload_kinds import OffloadDeviceEnum
from polyaccel_deepspeed.utils import logger as log

DEFAULT_LEAF_MODULE_CLASSES = [*LeafModuleConfig().classes]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedConfigModel(BaseModel):
    """A section. Keys that are "auto" stand at their defaults, and unknown ones are a ValidationError.

    A field whose `json_schema_extra` has `"deprecated": True` may name another as `new_param`, which then gets its
    value, by `new_param_fn` where there is one; `"set_new_param": False` leaves it alone.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if value != "auto" or key == "replace_method"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, Mapping) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, name: str, extra: Mapping[str, Any]) -> None:
        """Give the value of a field of an older name to the field that has replaced it."""
        wanted = extra.get("new_param", "")
        why = f": use {wanted}" if wanted else ""
        log.warning("the config's key %s is deprecated%s. %s", name, why, extra.get("deprecated_msg", ""))
        if not wanted or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda given: given)(getattr(self, name))
        delattr(self, name)
        *tables, last = wanted.split(".")
        owner = reduce(getattr, tables, self)
        assert last not in owner.model_fields_set, f"{name} and {wanted}, which has replaced it, are both given"
        setattr(owner, last, value)


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_param`."""

    device: OffloadDeviceEnum = "none"  # type: ignore[assignment] # the value is what a config has
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(100_000_000, ge=0)
    max_in_cpu: int = Field(1_000_000_000, ge=0)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_optimizer`."""

    device: OffloadDeviceEnum = "none"  # type: ignore[assignment] # the value is what a config has
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes of tiles overlap with the update."""
        return self.pipeline_read or self.pipeline_write


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """`zero_optimization.leaf_module`."""

    classes: list[str] = Field(default_factory=lambda: [*DEFAULT_LEAF_MODULE_CLASSES])
    names: list[str] = Field(default_factory=lambda: [*DEFAULT_LEAF_MODULE_NAMES])
    name_suffixes: list[str] = Field(default_factory=lambda: [*DEFAULT_LEAF_MODULE_NAME_SUFFIXES])

    @field_validator("classes", "names", "name_suffixes", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def _on_host(section: type[DeepSpeedConfigModel]) -> Any:
    return lambda is_on: section(device=OffloadDeviceEnum.cpu) if is_on else None


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """`zero_optimization`."""

    stage: ZeroStageEnum = 0  # type: ignore[assignment] # the value is what a config has
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(500_000_000, gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(500_000_000, ge=0)
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: dict[str, Any] | None = None
    sub_group_size: int = Field(1_000_000_000, ge=0)
    cpu_offload_param: bool | None = Field(
        None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "offload_param",
            "new_param_fn": _on_host(DeepSpeedZeroOffloadParamConfig),
        },
    )
    cpu_offload_use_pin_memory: bool | None = Field(
        None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "offload_param or offload_optimizer",
            "set_new_param": False,
        },
    )
    cpu_offload: bool | None = Field(
        None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "offload_optimizer",
            "new_param_fn": _on_host(DeepSpeedZeroOffloadOptimizerConfig),
        },
    )
    prefetch_bucket_size: int = Field(50_000_000, ge=0, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(100_000, ge=0, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(sys.maxsize, ge=0, alias="stage3_model_persistence_threshold")
    max_live_parameters: int = Field(1_000_000_000, ge=0, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(1_000_000_000, ge=0, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = Field(
        False, json_schema_extra={"deprecated": True, "new_param": "gather_16bit_weights_on_model_save"}
    )
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="after")
    def _agree(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError("compute_grad_norm=false is for the stages 1 and 2")
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1.0 and self.stage != 3:
            raise ValueError("offload_optimizer.ratio below 1 is for stage 3")
        if self.stage == 3 and self.elastic_checkpoint:
            log.warning(
                "elastic checkpointing is deprecated and has no effect: checkpoints load at any number of ranks"
            )
        return self


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """`bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """`fp16`. What only a dynamic scale uses is checked where there is one."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _scale(cls, value: Any) -> float:
        number = _number("loss_scale", value)
        if number < 0:
            raise ValueError("fp16.loss_scale must be at least 0, which is a dynamic one")
        return number

    @field_validator("loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _count(cls, value: Any, info: Any) -> Any:
        _number(info.field_name, value)
        return value

    @model_validator(mode="after")
    def _agree(self) -> DeepSpeedFP16Config:
        for name in ("loss_scale_window", "min_loss_scale"):
            if self.enabled and self.loss_scale == 0 and getattr(self, name) <= 0:
                raise ValueError(f"fp16.{name} must be above 0 where the loss scale is dynamic")
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the scale that a dynamic one starts at."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of DeepSpeed's dynamic loss scale."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"fp16.{name} must be a number, and finite")
    return number


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the section `zero_optimization` of a config; true and false are the stages 1 and 0."""
    section = param_dict.get("zero_optimization", {})
    return DeepSpeedZeroConfig(**({"stage": int(section)} if isinstance(section, bool) else section))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section `bf16` of a config, or `bfloat16`, its older name."""
    section = param_dict.get("bf16")
    return DeepSpeedBF16Config(**(param_dict.get("bfloat16", {}) if section is None else section))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section `fp16` of a config."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))
