"""Devices that this machine need not have: their probes on made-up machines, and their methods on stand-in modules.

The stand-ins obey the surface that torch documents for device modules. None of this is a run on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Accelerator, Capabilities, Probe
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.cuda import CudaAccelerator
from polyaccel.accelerators.memory import host
from polyaccel.accelerators.mps import MpsAccelerator
from polyaccel.accelerators.npu import NpuAccelerator
from polyaccel.accelerators.torch_device import TorchAccelerator
from polyaccel.accelerators.xpu import XpuAccelerator
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.testkit.accelerator import AcceleratorContract

DEVICES: Sequence[type[TorchAccelerator]] = (CudaAccelerator, XpuAccelerator, NpuAccelerator, MpsAccelerator)


class StandInEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.recorded_at_ms = enable_timing, -1.0

    def record(self, stream: Any = None) -> None:
        self.recorded_at_ms = 1e3 * perf_counter()

    def wait(self) -> None:
        StandInModule.waits += 1

    def synchronize(self) -> None:
        assert self.recorded_at_ms >= 0

    def query(self) -> bool:
        return self.recorded_at_ms >= 0

    def elapsed_time(self, later: StandInEvent) -> float:
        assert self.timed
        assert later.timed
        return later.recorded_at_ms - self.recorded_at_ms


class StandInStream:
    def wait_event(self, event: StandInEvent) -> None:
        assert event.query()

    def synchronize(self) -> None:
        StandInModule.synchronized += 1


class StandInModule:
    """torch.cuda's documented surface over host memory: one device, synchronous."""

    synchronized = 0
    waits = 0
    index = 0
    generator = torch.Generator()
    Stream, Event = StandInStream, StandInEvent
    event = SimpleNamespace(Event=StandInEvent)
    present = StandInStream()

    @staticmethod
    def device_count() -> int:
        return 2

    @classmethod
    def current_device(cls) -> int:
        return cls.index

    @classmethod
    def set_device(cls, index: int) -> None:
        cls.index = index

    @classmethod
    def synchronize(cls) -> None:
        cls.synchronized += 1

    @classmethod
    def current_stream(cls) -> StandInStream:
        return cls.present

    @classmethod
    @contextmanager
    def stream(cls, stream: StandInStream) -> Any:
        before, cls.present = cls.present, stream
        yield
        cls.present = before

    @classmethod
    def get_rng_state(cls) -> torch.Tensor:
        return cls.generator.get_state()

    @classmethod
    def set_rng_state(cls, state: torch.Tensor) -> None:
        cls.generator.set_state(state)

    @staticmethod
    def memory_allocated() -> int:
        return host.memory_stats().allocated_nbytes

    @staticmethod
    def max_memory_allocated() -> int:
        return host.memory_stats().peak_nbytes

    memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        stats = host.memory_stats()
        return stats.free_nbytes, stats.total_nbytes

    @staticmethod
    def reset_peak_memory_stats() -> None:
        host.reset_peak()

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation

    @staticmethod
    def get_device_properties() -> Any:
        return SimpleNamespace(has_fp64=False)

    # What only torch.mps has.
    current_allocated_memory = memory_allocated
    driver_allocated_memory = max_memory_allocated

    @staticmethod
    def recommended_max_memory() -> int:
        return host.memory_stats().total_nbytes


class StandInAccelerator(TorchAccelerator):
    """TorchAccelerator as it is, on a device module that works on host memory."""

    name = "stand_in"
    torch_device_type = "cpu"

    @property
    def _module(self) -> Any:
        return StandInModule

    def _torch_device(self) -> torch.device:
        return torch.device("cpu")

    def current_device(self) -> DeviceId:
        return DeviceId("cpu")  # the host has no index

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "made up", 100)

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=frozenset(DType), default_comm="gloo")

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Any:
        return super().allocate(numel, dtype)  # torch pins no memory without a device


class TestStandIn(AcceleratorContract):
    def make(self) -> Accelerator:
        StandInModule.index = 0
        return StandInAccelerator()


@pytest.fixture
def stand_in_module(monkeypatch: pytest.MonkeyPatch) -> type[StandInModule]:
    StandInModule.index = 0
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: StandInModule)
    monkeypatch.setattr(NpuAccelerator, "extension", None)
    return StandInModule


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("stand_in_module")
def test_streams_events_and_memory_of_every_device(
    device: type[TorchAccelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "perf_counter", count(0.0, 0.25).__next__)
    accelerator = device()
    first = accelerator.current_stream().record()
    second = accelerator.new_stream().record()
    accelerator.current_stream().wait(second)
    second.synchronize()
    assert first.elapsed_ms(second) == 250.0
    assert second.is_reached()
    before = StandInModule.synchronized
    accelerator.synchronize()
    accelerator.current_stream().synchronize()
    assert StandInModule.synchronized == before + 2
    accelerator.reset_peak_memory()
    stats = accelerator.memory_stats()
    assert stats.total_nbytes >= stats.free_nbytes >= 0
    assert stats.peak_nbytes >= stats.allocated_nbytes > 0
    stranger = object()
    with pytest.raises(PluginContractError) as caught:
        accelerator.new_stream().wait(stranger)  # type: ignore[arg-type]
    assert caught.value.value is stranger


@pytest.mark.usefixtures("stand_in_module")
def test_devices_are_set_by_index_and_ones_that_are_not_there_refused() -> None:
    cuda = CudaAccelerator()
    cuda.set_device(1)
    assert cuda.current_device() == DeviceId("cuda", 1)
    with pytest.raises(ShardingError) as caught:
        cuda.set_device(2)
    assert caught.value.value == 2
    assert "cuda:2" in str(caught.value)
    mps = MpsAccelerator()
    mps.set_device(3)
    assert (mps.current_device(), mps.device_count()) == (DeviceId("mps", 0), 1)


@pytest.mark.usefixtures("stand_in_module")
def test_types_and_comm_of_every_device() -> None:
    lacks = {
        "cuda": {DType.BFLOAT16},  # the stand-in only emulates it
        "xpu": {DType.FLOAT64},
        "npu": {DType.FLOAT64},
        "mps": {DType.FLOAT64},
    }
    comm = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mps": "gloo"}
    for device in DEVICES:
        capabilities = device().capabilities()
        assert frozenset(DType) - capabilities.dtypes == lacks[device.name]
        assert capabilities.default_comm == comm[device.name]


def _machine(
    monkeypatch: pytest.MonkeyPatch, *, files: Sequence[str] = (), build: dict[str, str] | None = None, node: str = ""
) -> None:
    """A machine with these device files and this build of torch, in a process that has not loaded torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device_probe, "loaded_torch", lambda: None)
    monkeypatch.setattr(device_probe, "torch_build", lambda: build)
    monkeypatch.setattr(device_probe, "intel_render_node", lambda: node or None)
    monkeypatch.setattr(device_probe, "glob", lambda pattern: [file for file in files if Path(file).match(pattern)])


def test_cuda_needs_a_gpu_and_a_torch_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, build={"version": "2.13.0+cu128", "cuda": "12.8"})
    assert not CudaAccelerator.probe().usable
    _machine(monkeypatch, files=["/dev/nvidiactl"], build={"version": "2.13.0+cu128", "cuda": "12.8"})
    assert CudaAccelerator.probe() == Probe(True, "/dev/nvidiactl exists", 100)
    _machine(monkeypatch, files=["/dev/nvidiactl"], build={"version": "2.13.0+cpu"})
    assert "torch 2.13.0+cpu was built without cuda" in CudaAccelerator.probe().reason
    _machine(monkeypatch, files=["/dev/kfd"], build={"version": "2.13.0+rocm", "hip": "6.4"})
    assert CudaAccelerator.probe().usable
    _machine(monkeypatch, files=["/dev/kfd"], build={"version": "2.13.0", "cuda": "12.8"})
    assert not CudaAccelerator.probe().usable
    _machine(monkeypatch, files=["/dev/nvidiactl"], build=None)
    assert "torch is not installed" in CudaAccelerator.probe().reason


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_absent(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    _machine(monkeypatch, files=["/dev/nvidiactl"], build={"cuda": "12.8"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    probe = CudaAccelerator.probe()
    assert not probe.usable
    assert "CUDA_VISIBLE_DEVICES" in probe.reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert CudaAccelerator.probe().usable


def test_xpu_needs_an_intel_gpu_and_a_torch_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, build={"xpu": "20250101"})
    assert "no Intel GPU" in XpuAccelerator.probe().reason
    _machine(monkeypatch, build={"xpu": "20250101"}, node="/dev/dri/renderD128")
    assert XpuAccelerator.probe().usable
    _machine(monkeypatch, build={"version": "2.13.0+cpu"}, node="/dev/dri/renderD128")
    assert "built without xpu" in XpuAccelerator.probe().reason


def test_npu_needs_a_device_and_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch)
    assert "no Ascend NPU" in NpuAccelerator.probe().reason
    _machine(monkeypatch, files=["/dev/davinci_manager"])
    assert "no Ascend NPU" in NpuAccelerator.probe().reason
    _machine(monkeypatch, files=["/dev/davinci0"])
    assert "not both installed" in NpuAccelerator.probe().reason
    monkeypatch.setattr("polyaccel.accelerators.npu.find_spec", lambda name: object())
    assert NpuAccelerator.probe().usable


def test_mps_needs_apple_silicon_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, build={"version": "2.13.0"})
    assert not MpsAccelerator.probe().usable
    monkeypatch.setattr("polyaccel.accelerators.mps.sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr("polyaccel.accelerators.mps.platform.machine", lambda: "arm64")
    assert MpsAccelerator.probe().usable
    _machine(monkeypatch, build=None)
    assert "torch is not installed" in MpsAccelerator.probe().reason


def test_a_loaded_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(count: int) -> Any:
        module = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)
        return SimpleNamespace(__version__="9.9", cuda=module, backends=SimpleNamespace(mps=module))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device_probe, "loaded_torch", lambda: fake(2))
    assert CudaAccelerator.probe() == Probe(True, "torch 9.9 sees 2 cuda devices", 100)
    assert XpuAccelerator.probe() == Probe(False, "torch 9.9 has no torch.xpu", 100)
    monkeypatch.setattr(device_probe, "loaded_torch", lambda: fake(0))
    assert CudaAccelerator.probe() == Probe(False, "torch 9.9 sees no cuda device", 100)


def test_the_build_of_the_installed_torch_is_read_from_its_version_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = device_probe.torch_build()
    assert ours is not None
    assert ours["version"] == torch.__version__
    assert ours.get("cuda") == torch.version.cuda
    (tmp_path / "version.py").write_text(
        "__version__ = '3.0'\ncuda: Optional[str] = '13.1'\nhip: Optional[str] = None\n"
    )
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(device_probe, "find_spec", lambda name: spec)
    assert device_probe.torch_build() == {"version": "3.0", "cuda": "13.1"}
    (tmp_path / "version.py").unlink()
    assert device_probe.torch_build() == {}
    monkeypatch.setattr(device_probe, "find_spec", lambda name: None)
    assert device_probe.torch_build() is None


def test_an_array_whose_memory_torch_cannot_see_is_refused() -> None:
    with pytest.raises(PluginContractError) as caught:
        CpuAccelerator().import_array([1.0])
    assert caught.value.value == "builtins.list"
