"""The arguments of a named learning-rate schedule, which the models of the config check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyaccel.config.arguments import check_scheduler
from polyaccel.config.sections.scheduler import SCHEDULER_PARAMS, SchedulerConfig
from polyaccel.errors import ConfigError

NAMES = frozenset(SCHEDULER_PARAMS)
"""The schedules whose arguments have a model."""


def schedule_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the schedule `name`, typed and with defaults."""
    section, problems = check_scheduler(SchedulerConfig(type=name, params=dict(given)))
    if problems:
        raise ConfigError(problems)
    assert section is not None  # there is one to check
    return dict(section.params)
