"""The rates of this machine, measured with its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.planner.autotune import hardware_probe


def test_a_host_has_no_link_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_probe, "_NUMEL", 1 << 12)
    monkeypatch.setattr(hardware_probe, "_FILE_NBYTES", 1 << 12)
    found = hardware_probe.measured_rates(CpuAccelerator("numpy"), tmp_path)
    assert found.update_device_s == found.update_host_s > 0
    assert found.link_s == 0
    assert found.file_s > 0
    assert found.operation_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_taken_as_a_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_probe, "_NUMEL", 1 << 12)
    assert (
        hardware_probe.measured_rates(CpuAccelerator("numpy"), tmp_path / "absent").file_s
        == hardware_probe.USUAL.file_s
    )


def test_where_nothing_can_be_measured_rates_are_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert hardware_probe.rates_here(tmp_path) == hardware_probe.USUAL
