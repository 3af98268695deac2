"""`deepspeed.monitor`: DeepSpeed's names of the figures of a step, and writers that a script opens itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polyaccel.comm import default_communicator
from polyaccel.config.sections.monitors import (
    CometConfig,
    CsvMonitorConfig,
    MonitorSection,
    TensorBoardConfig,
    WandbConfig,
)
from polyaccel.observability.metrics import Event, StepMetrics
from polyaccel.observability.setup import ChosenMonitor, start_monitoring

_SECTIONS: dict[str, type[MonitorSection]] = {
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CsvMonitorConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "tensorboard": {"output_path": "./runs", "job_name": "DeepSpeedJobName"},
    "csv_monitor": {"output_path": "./csv_monitor", "job_name": "DeepSpeedJobName"},
    "wandb": {"project": "deepspeed"},
    "comet": {"samples_log_interval": 100},
}
"""What a section that is on means to DeepSpeed by the keys that it leaves out."""


def with_defaults(key: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """`section` of the config with DeepSpeed's defaults. An empty `output_path` is one that was left out."""
    given = {name: value for name, value in section.items() if (name, value) != ("output_path", "")}
    return {**DEFAULTS[key], **given}


def step_events(metrics: StepMetrics, *, scales: bool, with_times: bool) -> Iterator[Event]:
    """DeepSpeed's events of a step: the samples so far take the place of the step. `scales`: there is a loss scale;
    `with_times`: the times of phases too."""

    def event(name: str, value: float) -> Event:
        return f"Train/Samples/{name}", value, metrics.samples

    if metrics.loss is not None:
        yield event("train_loss", metrics.loss)
    if metrics.lr:
        yield event("lr", metrics.lr[0])
    if scales:
        yield event("loss_scale", metrics.loss_scale)
    if with_times:
        ms = {phase: 1e3 * seconds for phase, seconds in metrics.phase_s.items()}
        yield event("elapsed_time_ms_forward", ms["forward"])
        yield event("elapsed_time_ms_backward", ms["backward"] + ms["reduce"])
        yield event("elapsed_time_ms_backward_inner", ms["backward"])
        yield event("elapsed_time_ms_backward_allreduce", ms["reduce"])
        yield event("elapsed_time_ms_step", ms["update"] + ms["publish"])


class MonitorMaster:
    """The writers that `monitor_config` turns on, on rank 0: a config, or an object with DeepSpeed's sections."""

    def __init__(self, monitor_config: Any) -> None:
        """Collective where a section is enabled. Raises ConfigError as `initialize` does."""
        chosen = []
        for key, kind in _SECTIONS.items():
            section = _section(monitor_config, key)
            if section.get("enabled") is True:
                checked = kind.model_validate(with_defaults(key, section))
                chosen.append(ChosenMonitor(checked.plugin, key, checked.options))
        self._stream = start_monitoring(default_communicator(), None, chosen, {})

    @property
    def enabled(self) -> bool:
        """Whether this rank writes."""
        return self._stream.enabled

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write (tag, value, step) of each event."""
        self._stream.write_events(event_list)


def _section(config: Any, key: str) -> dict[str, Any]:
    section = config.get(key, {}) if isinstance(config, Mapping) else getattr(config, key, {})
    return dict(section) if isinstance(section, Mapping) else dict(vars(section))
