"""The contract on every accelerator but the CPU that is present here; a skip with its reason for each of the others."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.accelerators.base import API_VERSION, Accelerator
from polyaccel.registry import PluginGroup, PluginStatus, probe_all
from polyaccel.testkit.accelerator import AcceleratorContract

STATUSES = [
    status for status in probe_all(PluginGroup.ACCELERATORS, Accelerator, API_VERSION) if status.info.name != "cpu"
]


@pytest.mark.parametrize("status", STATUSES, ids=lambda status: status.info.name)
def test_what_is_present_can_be_made(status: PluginStatus) -> None:
    if not status.usable:
        pytest.skip(f"{status.info.name}: {status.reason}")
    assert isinstance(_make(status.plugin), Accelerator)


def _make(plugin: Any) -> Any:
    return plugin()


def _contract_of(plugin: Any) -> type[AcceleratorContract]:
    return type(f"Test{plugin.__name__}", (AcceleratorContract,), {"make": lambda self: _make(plugin)})


# pytest finds one class a device, and none for those that are absent.
globals().update({f"Test{status.info.name}": _contract_of(status.plugin) for status in STATUSES if status.usable})
