"""Modules of constants, of helpers for torch and of monitors."""

from __future__ import annotations

from polyaccel_deepspeed.keys import checkpoint_constants, optimizer_constants, schedule_constants
from polyaccel_deepspeed.names.entry import Module, Name, never, yes

_MONITORS = "polyaccel_deepspeed.engine.monitors"
SECTIONS = "polyaccel_deepspeed.config_sections"
LEAF_DEFAULTS = tuple(f"DEFAULT_LEAF_MODULE_{what}" for what in ("CLASSES", "NAMES", "NAME_SUFFIXES"))
OFFLOAD_SECTIONS = ("DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig")
PARAMS = ("get_dict_param", "get_list_param", "get_scalar_param")


def _constants(module: object) -> tuple[str, ...]:
    return tuple(filter(str.isupper, vars(module)))


SCHEDULE_CONSTANTS: dict[str, Name] = yes(schedule_constants.__name__, *_constants(schedule_constants))
OPTIMIZER_CONSTANTS: dict[str, Name] = yes(optimizer_constants.__name__, *_constants(optimizer_constants))
CONSTANTS: dict[str, Module] = {
    "deepspeed.checkpoint.constants": Module(
        "Names of files and of what is in them.",
        yes(checkpoint_constants.__name__, *_constants(checkpoint_constants)),
    ),
    "deepspeed.monitor.comet": Module(
        "Comet.",
        yes(_MONITORS, "CometMonitor")
        | never("a counter of DeepSpeed's monitor; samples_log_interval of the section counts", "EventsLogScheduler"),
    ),
    "deepspeed.monitor.config": Module(
        "Sections of monitors.",
        yes(
            _MONITORS,
            *("CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig"),
            "get_monitor_config",
        ),
    ),
    "deepspeed.monitor.csv_monitor": Module("Files of CSV.", yes(_MONITORS, "csvMonitor")),
    "deepspeed.monitor.tensorboard": Module("TensorBoard.", yes(_MONITORS, "TensorBoardMonitor")),
    "deepspeed.monitor.wandb": Module("Weights & Biases.", yes(_MONITORS, "WandbMonitor")),
    "deepspeed.runtime.precision_config": Module(
        "The sections fp16 and bf16.",
        yes(SECTIONS, "DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"),
    ),
    "deepspeed.runtime.zero.offload_config": Module(
        "Where states go.",
        yes("polyaccel_deepspeed.offload_kinds", "OffloadDeviceEnum", "OffloadStateTypeEnum")
        | yes(SECTIONS, *OFFLOAD_SECTIONS),
    ),
    "deepspeed.utils.numa": Module(
        "Cores of ranks.", yes("polyaccel_deepspeed.resources", "parse_range", "parse_range_list")
    ),
    "deepspeed.utils.torch": Module(
        "Questions about torch.",
        yes(
            "polyaccel_deepspeed.torch_helpers",
            *("is_functorch_transforming", "jit_script_compat", "register_grad_hook", "required_torch_version"),
        ),
    ),
}
