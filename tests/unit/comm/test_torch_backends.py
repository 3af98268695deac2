"""Backends of torch that exchange the memory of devices are usable where torch has the library and a device is here."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.cuda import CudaAccelerator
from polyaccel.accelerators.xpu import XpuAccelerator
from polyaccel.comm.backends.torch import backend
from polyaccel.comm.backends.torch.backend import NcclBackend, TorchBackend, XcclBackend
from polyaccel.errors import CommError

CASES = [
    (NcclBackend, CudaAccelerator, "libtorch_cuda.so"),
    (NcclBackend, CudaAccelerator, "libtorch_hip.so"),
    (XcclBackend, XpuAccelerator, "libtorch_xpu.so"),
]


@pytest.mark.parametrize(("kind", "accelerator", "library"), CASES)
def test_a_library_without_its_device_is_not_usable(
    kind: type[TorchBackend],
    accelerator: type[Accelerator],
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch from PyPI is on a host without a GPU."""
    monkeypatch.setattr(backend, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "torch.py")))
    monkeypatch.setattr(accelerator, "probe", lambda: device_probe.unusable("no device here"))
    lacks_library = kind.probe()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / library).touch()
    lacks_device = kind.probe()
    assert not lacks_library.usable
    assert not lacks_device.usable
    assert "no device here" in lacks_device.reason
    assert "no device here" not in lacks_library.reason
    monkeypatch.setattr(accelerator, "probe", lambda: device_probe.usable("a device"))
    assert kind.probe().usable


@pytest.mark.parametrize("kind", [NcclBackend, XcclBackend])
def test_a_backend_of_devices_is_not_for_the_host(kind: type[TorchBackend]) -> None:
    with pytest.raises(CommError) as caught:
        kind().register(CpuAccelerator())
    assert caught.value.value == "cpu"
    assert caught.value.hint
