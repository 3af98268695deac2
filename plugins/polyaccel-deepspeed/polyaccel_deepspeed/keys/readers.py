"""Functions that read one value of a config that is a dict, by DeepSpeed's names: the value there, or its default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyaccel_deepspeed.keys import constants

_MODES = ("WARN", "IGNORE", "FAIL")
_DTYPES = ("fp32", "fp16", "bf16")
_OPS = ("mean", "sum")


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return a value of a table, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def _reader(key: str, default: Any) -> Callable[[Mapping[str, Any]], Any]:
    def read(param_dict: Mapping[str, Any]) -> Any:
        return param_dict.get(key, default)

    read.__doc__ = f"Return `{key}` of a config, by default {default!r}."
    return read


get_dataloader_drop_last = _reader("dataloader_drop_last", constants.DATALOADER_DROP_LAST_DEFAULT)
get_disable_allgather = _reader("disable_allgather", constants.DISABLE_ALLGATHER_DEFAULT)
get_disable_python_gc = _reader("disable_python_gc", constants.DISABLE_PYTHON_GC_DEFAULT)
get_dump_state = _reader("dump_state", constants.DUMP_STATE_DEFAULT)
get_expert_data_topo_config = _reader(
    "use_data_before_expert_parallelism", constants.USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT
)
get_gradient_accumulation_steps = _reader("gradient_accumulation_steps", constants.GRADIENT_ACCUMULATION_STEPS_DEFAULT)
get_gradient_clipping = _reader("gradient_clipping", constants.GRADIENT_CLIPPING_DEFAULT)
get_gradient_predivide_factor = _reader("gradient_predivide_factor", constants.GRADIENT_PREDIVIDE_FACTOR_DEFAULT)
get_log_level = _reader("log_level", constants.LOG_LEVEL_DEFAULT)
get_managed_gradient_accumulation = _reader(
    "managed_gradient_accumulation", constants.MANAGED_GRADIENT_ACCUMULATION_DEFAULT
)
get_memory_breakdown = _reader("memory_breakdown", constants.MEMORY_BREAKDOWN_DEFAULT)
get_prescale_gradients = _reader("prescale_gradients", constants.PRESCALE_GRADIENTS_DEFAULT)
get_steps_per_print = _reader("steps_per_print", constants.STEPS_PER_PRINT_DEFAULT)
get_train_batch_size = _reader("train_batch_size", constants.TRAIN_BATCH_SIZE_DEFAULT)
get_train_micro_batch_size_per_gpu = _reader(
    "train_micro_batch_size_per_gpu", constants.TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT
)
get_wall_clock_breakdown = _reader("wall_clock_breakdown", constants.WALL_CLOCK_BREAKDOWN_DEFAULT)
get_zero_allow_untested_optimizer = _reader(
    "zero_allow_untested_optimizer", constants.ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT
)
get_zero_force_ds_cpu_optimizer = _reader("zero_force_ds_cpu_optimizer", constants.ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT)
get_checkpoint_params = _reader("checkpoint", {})
get_data_types_params = _reader("data_types", {})


def get_communication_data_type(
    param_dict: Mapping[str, Any],
    comm_type: str = constants.COMMUNICATION_DATA_TYPE,
    comm_data_type_default: str | None = constants.COMMUNICATION_DATA_TYPE_DEFAULT,
) -> Any:
    """Return torch's type for the collectives; None where nothing says one.

    Raises:
        ConfigError: It is another type.
    """
    import torch

    value = param_dict.get(comm_type, comm_data_type_default)
    if value is None:
        return None
    _require(comm_type, value.lower(), _DTYPES)
    return dict(zip(_DTYPES, (torch.float32, torch.float16, torch.bfloat16), strict=True))[value.lower()]


def get_gradient_allreduce_op(param_dict: Mapping[str, Any]) -> Any:
    """Return "mean" or "sum".

    Raises:
        ConfigError: It is neither.
    """
    value = param_dict.get("gradient_allreduce_op", "mean")
    return _require("gradient_allreduce_op", value.lower() if isinstance(value, str) else value, _OPS)


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> Any:
    """Return what becomes of tags that differ, in capitals.

    Raises:
        ConfigError: There is no such mode.
    """
    return _require("checkpoint.tag_validation", str(checkpoint_params.get("tag_validation", "Warn")).upper(), _MODES)


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Mapping[str, Any]) -> bool:
    """Return `checkpoint.parallel_write.pipeline_stage`.

    Raises:
        ConfigError: It is neither true nor false.
    """
    value = checkpoint_params.get("parallel_write", {}).get("pipeline_stage", False)
    _require("checkpoint.parallel_write.pipeline_stage", value, (True, False))
    return bool(value)


def get_pipeline_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `pipeline`, with defaults."""
    defaults = {"stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 0}
    return {**defaults, "pipe_partitioned": True, "grad_partitioned": True, **param_dict.get("pipeline", {})}


def get_optimizer_name(param_dict: Mapping[str, Any]) -> Any:
    """Return `optimizer.type`."""
    return param_dict.get("optimizer", {}).get("type")


def get_optimizer_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `optimizer.params`; None without them, or without a type."""
    return param_dict["optimizer"].get("params") if get_optimizer_name(param_dict) is not None else None


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """Return `optimizer.params.max_grad_norm`."""
    return (get_optimizer_params(param_dict) or {}).get("max_grad_norm")


def get_optimizer_legacy_fusion(param_dict: Mapping[str, Any]) -> bool:
    """Return `optimizer.legacy_fusion`."""
    return bool(param_dict.get("optimizer", {}).get("legacy_fusion", False))


def get_scheduler_name(param_dict: Mapping[str, Any]) -> Any:
    """Return `scheduler.type`."""
    return param_dict.get("scheduler", {}).get("type")


def get_scheduler_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `scheduler.params`; None without them, or without a type."""
    return param_dict["scheduler"].get("params") if get_scheduler_name(param_dict) is not None else None


def get_torch_autocast_enabled(param_dict: Mapping[str, Any]) -> bool:
    """Return `torch_autocast.enabled`."""
    return bool(param_dict.get("torch_autocast", {}).get("enabled", False))


def get_lower_precision_safe_modules(param_dict: Mapping[str, Any]) -> Any:
    """Return `torch_autocast.lower_precision_safe_modules`.

    Raises:
        ConfigError: They are no strings.
    """
    found = param_dict.get("torch_autocast", {}).get("lower_precision_safe_modules")
    for name in found or ():
        if not isinstance(name, str):
            key = "torch_autocast.lower_precision_safe_modules"
            raise _error(key, name, "should be the name of a class", "write a list of strings")
    return found


def _require(key: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        wanted = " or ".join(map(repr, allowed))
        raise _error(key, value, f"should be {wanted}", "choose one of these")
    return value


def _error(key: str, value: Any, expected: str, hint: str) -> ValueError:
    from polyaccel.errors import ConfigError, Problem  # the table of names reads this module, and loads no polyaccel

    return ConfigError([Problem(key, value, expected, hint)])
