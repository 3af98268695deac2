"""What follows from a config for every frontend's engine: what it counts with, how it saves, and what ranks share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from polyaccel.checkpoint.in_memory.replicas import ReplicaPolicy
from polyaccel.checkpoint.retention import KeepBest, Retention
from polyaccel.checkpoint.saver import SavePolicy
from polyaccel.config import ResolvedConfig
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.engine.policies.watching import reporting_of
from polyaccel.engine.progress import EngineSettings
from polyaccel.errors import ConfigError, Problem
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.zero.update.named_optimizers import StateBits, slice_optimizer
from polyaccel.zero.update.optimizers import SliceOptimizer

_COMMON_SETTINGS = {
    "gradient_accumulation_steps", "optimizer", "scheduler", "gradient_clipping", "prescale_gradients",
    "gradient_predivide_factor", "gradient_allreduce_op", "communication_data_type", "zero_optimization", "fp16",
    "bf16", "torch_autocast", "data_types", "matrix_kernels",
}  # fmt: skip
VARIABLES: Mapping[str, str] = {
    "DS_ACCELERATOR": "accelerator",
    "POLYACCEL_ACCELERATOR": "accelerator",
    "POLYACCEL_COMM": "comm.backend",
    "POLYACCEL_MATRIX_KERNELS": "matrix_kernels",
    "POLYACCEL_LOG": "log_level",
    "POLYACCEL_VERIFY": "verify",
}
"""The key that each of them replaces; docs/reference/environment.md explains them."""


def engine_settings_of(config: ResolvedConfig) -> EngineSettings:
    """The settings that every frontend's engine counts with and answers to users."""
    return EngineSettings(
        train_batch_size=config.train_batch_size,
        micro_batch_size=config.train_micro_batch_size_per_gpu,
        accumulation_steps=config.gradient_accumulation_steps,
        zero_stage=config.zero_optimization.stage,
        gradient_clipping=config.gradient_clipping,
        reporting=reporting_of(config),
        counts_work=config.timers.throughput.enabled,
        saving=save_policy_of(config),
    )


def save_policy_of(config: ResolvedConfig) -> SavePolicy:
    """How engines save."""
    storage, options = config.checkpoint.storage_plugin
    best, replica = config.checkpoint.keep_best, config.checkpoint.in_memory_section
    return SavePolicy(
        tag_validation=config.checkpoint.tag_validation,
        in_background=config.checkpoint.in_background,
        staging_nbytes=config.checkpoint.staging_memory,
        retention=Retention(
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            keep_best=KeepBest(best.metric, best.mode, best.count) if best else None,
        ),
        replica=None if replica is None else ReplicaPolicy(replica.memory),
        storage=storage,
        options=json.loads(json.dumps(options)),  # without the tables that refuse to change
        allows_bytes=config.checkpoint.allow_bytes,
        limit_s=config.checkpoint.timeout_s,
        raises_later=config.checkpoint.on_failure == "raise",
    )


def common_settings_of(config: ResolvedConfig) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks, as a tree; folders may differ."""
    common: dict[str, Any] = {**dict.fromkeys(_COMMON_SETTINGS, True), "mesh": {"capacity"}}
    tree: dict[str, Any] = config.model_dump(mode="json", by_alias=True, include=common)
    for section in ("offload_param", "offload_optimizer"):
        offload = tree["zero_optimization"].get(section) or {}
        for key in ("nvme_path", "tier_options"):
            offload.pop(key, None)
    return tree


def loss_scaler_of(config: ResolvedConfig) -> LossScaler:
    """The scaler of fp16 training; a constant 1 in every other precision."""
    autocast, fp16 = config.torch_autocast, config.fp16
    if not fp16.enabled and not (autocast.enabled and autocast.dtype == "float16"):
        return LossScaler()
    return LossScaler.from_config(
        loss_scale=fp16.loss_scale,
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
    )


def native_optimizer_of(config: ResolvedConfig) -> tuple[SliceOptimizer, dict[str, Any]] | None:
    """Return the config's optimizer with group defaults if it runs on slices, else None."""
    section = config.optimizer
    if section is None or section.type not in OPTIMIZERS:
        return None
    defaults = dict(section.params)
    if "adam_w_mode" in defaults:
        defaults["decoupled"] = defaults.pop("adam_w_mode")
    for switch in ("amsgrad", "torch_adam", "fp32_optimizer_states"):  # checked by the config, without other values
        defaults.pop(switch, None)
    if section.type == "ScheduleFreeAdamW" and config.scheduler is not None:
        expected = "a schedule-free optimizer averages updates of one learning rate"
        raise ConfigError([Problem("scheduler.type", config.scheduler.type, expected, "leave the section out")])
    return slice_optimizer(section.type, _state_bits_of(config, defaults.pop("state_bits", 32))), defaults


_WIDE_STATES = ("Lamb", "ScheduleFreeAdamW")
"""Optimizers on slices that compute with states of 32 bits alone."""


def _state_bits_of(config: ResolvedConfig, chosen: StateBits) -> StateBits:
    """The bits of optimizer states. Raises ConfigError for an optimizer that has no narrow ones."""
    key = "bf16.bf16_optimizer_states"
    if chosen != 32 or not (config.bf16.enabled and config.bf16.bf16_optimizer_states):
        return chosen
    if config.optimizer is not None and config.optimizer.type in _WIDE_STATES:
        expected = f"states of {config.optimizer.type} are float32"
        raise ConfigError([Problem(key, True, expected, "use another optimizer, or leave it out")])
    return 16


def require_wide_states(config: ResolvedConfig) -> None:
    """Raise ConfigError where weights or states are to have 16 bits, of an optimizer that is not this package's."""
    for section, keys in (
        ("bf16", ("bf16_optimizer_states", "bf16_master_weights_and_grads")),
        ("fp16", ("fp16_master_weights_and_grads",)),
    ):
        for key in keys:
            if getattr(config, section).enabled and getattr(getattr(config, section), key):
                hint = f"leave it out, or name one of {', '.join(OPTIMIZERS)} in the config"
                raise ConfigError([Problem(f"{section}.{key}", True, "this optimizer computes in float32", hint)])


def replaced_values(config: ResolvedConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each written value of `config` that `environment` replaces by another."""
    for variable, key in VARIABLES.items():
        written: object = config
        for name in key.split("."):
            written = getattr(written, name)
        value = environment.get(variable, "").strip()
        if value and written is not None and value.lower() != str(written).lower():
            yield f"{key} = {written!r} is replaced by {variable}={value}"
