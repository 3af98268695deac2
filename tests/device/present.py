"""The accelerators that tests of devices run on."""

from __future__ import annotations

import pytest

from polyaccel.accelerators.base import Accelerator
from polyaccel.registry import PluginGroup, PluginStatus, probe_all

STATUSES = [
    status
    for status in probe_all(PluginGroup.ACCELERATORS, Accelerator, Accelerator.API_VERSION)
    if status.info.name != "cpu"
]
"""Of every accelerator but the CPU, those that are not present here too."""

each_device = pytest.mark.parametrize("status", STATUSES, ids=lambda status: status.info.name)


def need(status: PluginStatus) -> None:
    """Skip the test, with the reason, where the device is not present."""
    if not status.usable:
        pytest.skip(f"{status.info.name}: {status.reason}")
