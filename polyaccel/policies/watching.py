"""What follows from a config for those who watch the run: its monitors, and what it reports."""

from __future__ import annotations

from polyaccel.config import ResolvedConfig
from polyaccel.engine.recording import Reporting
from polyaccel.watch.opening import ChosenMonitor

STEPS_PER_BREAKDOWN = 10
"""Steps between two progress lines with a breakdown where `steps_per_print` says nothing, as in DeepSpeed."""


def reporting_of(config: ResolvedConfig) -> Reporting:
    """What progress lines say, and how often."""
    default_every = STEPS_PER_BREAKDOWN if config.wall_clock_breakdown or config.memory_breakdown else None
    return Reporting(
        every=config.steps_per_print or default_every,
        phases=config.wall_clock_breakdown,
        memory=config.memory_breakdown,
        synchronizes=config.timers.throughput.synchronized,
    )


def monitors_of(config: ResolvedConfig) -> list[ChosenMonitor]:
    """The monitors that are on: of `monitors`, of the sections that are enabled, and JSON lines in a `run_folder`."""
    chosen = [ChosenMonitor(name, f"monitors.{name}", options) for name, options in config.monitors.items()]
    if config.run_folder is not None and "jsonl" not in config.monitors:
        chosen.insert(0, ChosenMonitor("jsonl", "monitors.jsonl", {}))
    return chosen + [ChosenMonitor(each.plugin, key, each.options) for key, each in config.monitor_sections.items()]
