"""The rates of this machine, measured with its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.tuning import rates


def test_a_host_has_no_link_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_NUMEL", 1 << 12)
    monkeypatch.setattr(rates, "_FILE_NBYTES", 1 << 12)
    found = rates.measured_rates(CpuAccelerator("numpy"), tmp_path)
    assert found.update_device_s == found.update_host_s > 0
    assert found.link_s == 0
    assert found.file_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_taken_as_a_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_NUMEL", 1 << 12)
    assert rates.measured_rates(CpuAccelerator("numpy"), tmp_path / "absent").file_s == rates.USUAL.file_s


def test_where_nothing_can_be_measured_rates_are_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert rates.rates_here(tmp_path) == rates.USUAL
