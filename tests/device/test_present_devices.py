"""The contract on every accelerator but the CPU that is present here; a skip with its reason for each of the others."""

from __future__ import annotations

from typing import Any

from present import STATUSES, each_device, need

from polyaccel.accelerators.base import Accelerator
from polyaccel.registry import PluginStatus
from polyaccel.testkit.accelerator import AcceleratorContract


@each_device
def test_what_is_present_can_be_made(status: PluginStatus) -> None:
    need(status)
    assert isinstance(_make(status.plugin), Accelerator)


def _make(plugin: Any) -> Any:
    return plugin()


def _contract_of(plugin: Any) -> type[AcceleratorContract]:
    return type(f"Test{plugin.__name__}", (AcceleratorContract,), {"make": lambda self: _make(plugin)})


# pytest finds one class a device, and none for those that are absent.
globals().update({f"Test{status.info.name}": _contract_of(status.plugin) for status in STATUSES if status.usable})
