"""`deepspeed.monitor.*`: the sections of the monitors, and the writer of each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from polyaccel_deepspeed.engine.monitor import MonitorMaster

_JOB = {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"}
_WANDB = {"enabled": False, "group": None, "team": None, "project": "deepspeed"}
_COMET = {
    "enabled": False,
    "samples_log_interval": 100,
    **dict.fromkeys(("project", "workspace", "api_key", "experiment_name", "experiment_key", "online", "mode")),
}


class MonitorSection(SimpleNamespace):
    """A section as attributes, with DeepSpeed's defaults."""

    _keys: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{**self._keys, **data})


class TensorBoardConfig(MonitorSection):
    """The section `tensorboard`."""

    _keys = _JOB


class CSVConfig(MonitorSection):
    """The section `csv_monitor`."""

    _keys = _JOB


class WandbConfig(MonitorSection):
    """The section `wandb`."""

    _keys = _WANDB


class CometConfig(MonitorSection):
    """The section `comet`."""

    _keys = _COMET


class DeepSpeedMonitorConfig:
    """The four sections; `enabled` where one of them is."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        self.tensorboard = TensorBoardConfig(**data.get("tensorboard", {}))
        self.comet = CometConfig(**data.get("comet", {}))
        self.wandb = WandbConfig(**data.get("wandb", {}))
        self.csv_monitor = CSVConfig(**data.get("csv_monitor", {}))
        self.enabled = any(section.enabled for section in vars(self).values())


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of a whole config."""
    names = ("tensorboard", "comet", "wandb", "csv_monitor")
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in names if param_dict.get(name)})


class _OneMonitor(MonitorMaster):
    """A writer of one section, whose keys are its attributes."""

    _key = ""
    enabled: bool = False

    def __init__(self, section: Any) -> None:
        super().__init__({self._key: {name: value for name, value in vars(section).items() if value is not None}})
        vars(self).update(vars(section))


class TensorBoardMonitor(_OneMonitor):
    """Files of TensorBoard."""

    _key = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)


class WandbMonitor(_OneMonitor):
    """A run of Weights & Biases."""

    _key = "wandb"

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)


class csvMonitor(_OneMonitor):  # noqa: N801 - DeepSpeed's name
    """A CSV file for each figure."""

    _key = "csv_monitor"

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)


class CometMonitor(_OneMonitor):
    """An experiment of Comet."""

    _key = "comet"

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
