"""What follows from a config for those who watch the run: its monitors, what it reports, and what is
profiled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.config import Config, ResolvedConfig
from polyaccel.core.mesh import Mesh
from polyaccel.engine.recording import Reporting
from polyaccel.engine.replica_groups import folder_of_group
from polyaccel.observability.alerts.settings import AlarmSettings
from polyaccel.observability.alerts.watching import RunAlarms
from polyaccel.observability.metrics import MetricSink
from polyaccel.observability.profiles import ProfileSettings, TableStyle
from polyaccel.observability.setup import ChosenMonitor
from polyaccel.observability.traces.recorder import RunTrace

STEPS_PER_BREAKDOWN = 10
"""Steps between two progress lines with a breakdown where `steps_per_print` is not set, as in DeepSpeed."""


def reporting_of(config: ResolvedConfig) -> Reporting:
    """The content of progress lines, and how often they come."""
    default_every = STEPS_PER_BREAKDOWN if config.wall_clock_breakdown or config.memory_breakdown else None
    return Reporting(
        every=config.steps_per_print or default_every,
        phases=config.wall_clock_breakdown,
        memory=config.memory_breakdown,
        synchronizes=config.timers.throughput.synchronized,
    )


def monitors_of(config: ResolvedConfig) -> list[ChosenMonitor]:
    """The monitors that are on: of `monitors`, of the sections that are enabled, and JSON lines in a `run_dir`."""
    chosen = [ChosenMonitor(name, f"monitors.{name}", options) for name, options in config.monitors.items()]
    if config.run_dir is not None and "jsonl" not in config.monitors:
        chosen.insert(0, ChosenMonitor("jsonl", "monitors.jsonl", {}))
    return chosen + [ChosenMonitor(each.plugin, key, each.options) for key, each in config.monitor_sections.items()]


def profile_settings_of(config: ResolvedConfig) -> ProfileSettings | None:
    """The step that is profiled; None where none is."""
    section = config.flops_profiler
    if not section.enabled:
        return None
    style = TableStyle(
        depth=section.module_depth,
        top=section.top_modules,
        detailed=section.detailed,
        recomputed=section.recompute_fwd_factor,
    )
    return ProfileSettings(
        step=section.profile_step,
        style=style,
        output_file=_absolute(section.output_file),
        folder=_absolute(config.run_dir),
    )


def _absolute(path: str | None) -> str | None:
    """The path as the working directory of now means it."""
    return None if path is None else os.path.abspath(path)


def trace_of(config: ResolvedConfig, communicator: Communicator) -> RunTrace | None:
    """What records the steps that are traced; None where none are."""
    if config.trace is None:
        return None
    first, last = config.trace.steps
    folder = Path(config.trace.dir or config.run_dir or ".").absolute()
    return RunTrace(communicator, first, last, folder, wants_profiler=config.trace.profiler)


def alarms_of(config: ResolvedConfig, communicator: Communicator, mesh: Mesh, monitor: MetricSink) -> RunAlarms | None:
    """The alerts of the run; None where they are off."""
    section = config.alerts
    if not section.enabled:
        return None
    settings = AlarmSettings(**section.model_dump(exclude={"enabled"}))
    stages = mesh.others(("pipe",))
    place = mesh.groups(stages).index(mesh.group(stages, communicator.rank)) if mesh.has_several("pipe") else 0
    return RunAlarms(settings, communicator, monitor, place=place)


def config_of_group(config: Config, index: int) -> Config:
    """Return the config of group `index`: each writes its own run folder, and the first alone writes to monitors."""
    changes: dict[str, Any] = {}
    if config.run_dir is not None:
        changes["run_dir"] = folder_of_group(config.run_dir, index)
    if index:
        changes["monitors"] = {}
        for key, section in config.monitor_sections.items():
            changes[key] = section.model_copy(update={"enabled": False})
    return config.model_copy(update=changes) if changes else config
