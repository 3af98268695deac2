"""What follows from a config for those who watch the run: its monitors."""

from __future__ import annotations

from polyaccel.config import ResolvedConfig
from polyaccel.watch.opening import ChosenMonitor


def monitors_of(config: ResolvedConfig) -> list[ChosenMonitor]:
    """The monitors that are on: of `monitors`, of the sections that are enabled, and JSON lines in a `run_folder`."""
    chosen = [ChosenMonitor(name, f"monitors.{name}", options) for name, options in config.monitors.items()]
    if config.run_folder is not None and "jsonl" not in config.monitors:
        chosen.insert(0, ChosenMonitor("jsonl", "monitors.jsonl", {}))
    return chosen + [ChosenMonitor(each.plugin, key, each.options) for key, each in config.monitor_sections.items()]
