"""Which accelerator is chosen: argument, environment, then what is present; refusals list everything installed."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from polyaccel.accelerators import choose_accelerator, detect, get_accelerator, set_accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.cuda import CudaAccelerator
from polyaccel.accelerators.mps import MpsAccelerator
from polyaccel.core.types import Probe
from polyaccel.errors import PluginConflict, PluginContractError, PluginNotFound


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in detect.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    # No device, whatever this machine has; tests that want one say so.
    monkeypatch.setattr(CudaAccelerator, "probe", classmethod(lambda cls: Probe(False, "no GPU in this test", 100)))
    monkeypatch.setattr(detect, "_chosen", None)


def _present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaAccelerator, "probe", classmethod(lambda cls: Probe(True, "a GPU in this test", 100)))


def test_without_a_device_the_cpu_is_chosen_and_logged_with_its_package(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="polyaccel"):
        first, second = get_accelerator(), get_accelerator()
    assert isinstance(first, CpuAccelerator)
    assert first is second
    lines = [record.getMessage() for record in caplog.records if "accelerator cpu" in record.getMessage()]
    assert len(lines) == 1
    assert "polyaccel 0." in lines[0]


def test_the_host_beside_a_device_is_no_choice_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Device(CpuAccelerator):
        name = "device"

    device, host = Device(), CpuAccelerator()
    with caplog.at_level(logging.INFO, logger="polyaccel"):
        beside = detect.host_accelerator(device)
    assert (beside.name, detect.host_accelerator(host)) == ("cpu", host)
    assert caplog.records == []


def test_a_present_device_goes_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _present(monkeypatch)
    assert isinstance(choose_accelerator(), CudaAccelerator)


def test_of_two_equally_good_devices_somebody_must_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    _present(monkeypatch)
    monkeypatch.setattr(MpsAccelerator, "probe", classmethod(lambda cls: Probe(True, "Metal in this test", 100)))
    with pytest.raises(PluginConflict) as caught:
        choose_accelerator()
    assert "accelerator 'cuda' (package polyaccel 0." in str(caught.value)
    assert "accelerator 'mps' (package polyaccel 0." in str(caught.value)
    assert "hint: choose one: DS_ACCELERATOR=cuda or DS_ACCELERATOR=mps" in str(caught.value)
    assert isinstance(choose_accelerator("cuda"), CudaAccelerator)


@pytest.mark.parametrize("name", ["CUDA", "Cudda"])
def test_a_name_in_other_letters_has_the_hint_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator()
    assert caught.value.value == name
    assert "'cuda'" in str(caught.value)


@pytest.mark.parametrize("variable", detect.VARIABLES)
def test_the_environment_goes_before_what_is_present(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    _present(monkeypatch)
    monkeypatch.setenv(variable, "cpu")
    assert isinstance(choose_accelerator(), CpuAccelerator)
    assert isinstance(choose_accelerator("cuda"), CudaAccelerator)  # and the argument before both


def test_two_variables_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("POLYACCEL_ACCELERATOR", "cpu")
    assert isinstance(choose_accelerator(), CpuAccelerator)
    monkeypatch.setenv("POLYACCEL_ACCELERATOR", "cuda")
    with pytest.raises(PluginConflict) as caught:
        choose_accelerator()
    assert caught.value.value == {"POLYACCEL_ACCELERATOR": "cuda", "DS_ACCELERATOR": "cpu"}
    assert all(part in str(caught.value) for part in ("POLYACCEL_ACCELERATOR=cuda", "DS_ACCELERATOR=cpu"))


def test_an_unknown_name_lists_what_is_installed_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cudda")
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator()
    message = str(caught.value)
    assert "'cudda' (from DS_ACCELERATOR)" in message
    assert "cpu (polyaccel" in message
    assert "not usable, no GPU in this test" in message
    assert "did you mean 'cuda'?" in message


def test_an_absent_device_is_refused_with_its_reason() -> None:
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator("cuda")
    assert caught.value.value == "cuda"
    assert "GPU" in str(caught.value)


def test_a_broken_device_does_not_hinder_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cls: type) -> Probe:
        raise OSError("driver fell over")

    monkeypatch.setattr(MpsAccelerator, "probe", classmethod(fail))
    assert isinstance(choose_accelerator(), CpuAccelerator)
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator("cudda")
    assert caught.value.value == "cudda"
    with pytest.raises(PluginContractError) as caught:
        choose_accelerator("mps")
    assert caught.value.value == "polyaccel.accelerators.mps:MpsAccelerator"
    assert "OSError" in str(caught.value)


def test_no_usable_accelerator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuAccelerator, "probe", classmethod(lambda cls: Probe(False, "melted")))
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator()
    assert "x86_64" in str(caught.value)


def test_a_constructor_that_fails_is_the_plugins_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CpuAccelerator) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(CpuAccelerator, "__init__", fail)
    with pytest.raises(PluginContractError) as caught:
        choose_accelerator("cpu")
    assert caught.value.value == "polyaccel.accelerators.cpu:CpuAccelerator"


def test_what_is_set_is_what_is_got() -> None:
    mine = CpuAccelerator("numpy")
    set_accelerator(mine)
    assert get_accelerator() is mine
    with pytest.raises(PluginContractError) as caught:
        set_accelerator("cpu")  # type: ignore[arg-type]
    assert caught.value.value == "cpu"


def test_choosing_loads_neither_torch_nor_jax() -> None:
    program = """
import sys
from polyaccel.accelerators import get_accelerator
get_accelerator()
assert not {"torch", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
