"""The built-in plugins, which the project's own metadata names, are there and keep their contracts."""

from __future__ import annotations

from importlib.metadata import EntryPoint, distribution
from typing import Any

import pytest

from polyaccel.accelerators.base import Accelerator
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import CommBackend
from polyaccel.core.types import Probe
from polyaccel.launch.base import Launcher
from polyaccel.observability.metrics import Monitor
from polyaccel.offload.tier import Tier

CONTRACTS: dict[str, type[Any]] = {
    "polyaccel.accelerators": Accelerator,
    "polyaccel.comm": CommBackend,
    "polyaccel.launchers": Launcher,
    "polyaccel.monitors": Monitor,
    "polyaccel.storage": Storage,
    "polyaccel.tiers": Tier,
}
POINTS = [point for point in distribution("polyaccel").entry_points if point.group in CONTRACTS]


def test_every_kind_of_plugin_has_a_built_in() -> None:
    assert {point.group for point in POINTS} == set(CONTRACTS)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.group}:{point.name}")
def test_a_built_in_loads_and_says_whether_it_can_be_used(point: EntryPoint) -> None:
    plugin = point.load()
    assert issubclass(plugin, CONTRACTS[point.group])
    assert not getattr(plugin, "__abstractmethods__", None)
    assert plugin.name == point.name
    probe = plugin.probe()
    assert isinstance(probe, Probe)
    assert probe.reason
