"""Devices that torch knows and no plugin is for: found by name, and what they lack is found and replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyaccel.accelerators import torch_generic
from polyaccel.accelerators.base import NullEvent
from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.accelerators.torch_generic import GenericAccelerator, device_plugin
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginNotFound, ShardingError
from polyaccel.testkit.accelerator import AcceleratorContract


class BareModule:
    """A device module with what no device can be without, over host memory."""

    synchronized = 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(index: int) -> None:
        assert index == 0

    @classmethod
    def synchronize(cls) -> None:
        cls.synchronized += 1


class BareAccelerator(GenericAccelerator):
    """The host as if it were a device that torch knows little of."""

    name = "bare"
    torch_device_type = "cpu"

    def _torch_device(self) -> torch.device:
        return torch.device("cpu")

    def current_device(self) -> DeviceId:
        return DeviceId("cpu")

    def _computes(self, dtype: DType) -> bool:
        return dtype is not DType.FLOAT16 and super()._computes(dtype)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> BareAccelerator:
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: BareModule)
    return BareAccelerator()


@pytest.mark.usefixtures("bare")
class TestBare(AcceleratorContract):
    def make(self) -> GenericAccelerator:
        return BareAccelerator()


def test_what_a_device_lacks_is_reported_and_replaced(bare: BareAccelerator) -> None:
    capabilities = bare.capabilities()
    assert [note.partition(":")[0] for note in capabilities.notes] == [
        "no streams",
        "no pinned memory",
        "no numbers on memory",
        "no generator state",
    ]
    assert not capabilities.streams
    assert not capabilities.host_pinning
    assert frozenset(DType) - capabilities.dtypes == {DType.FLOAT16}
    assert bare.memory_stats().total_nbytes == 0
    bare.reset_peak_memory()
    assert bare.allocate(3, DType.FLOAT32, pinned=True).device.type == "cpu"


def test_a_point_in_the_one_queue_is_reached_when_the_device_is(bare: BareAccelerator) -> None:
    before = BareModule.synchronized
    event = bare.new_stream().record()
    assert isinstance(event, NullEvent)
    assert BareModule.synchronized == before + 1
    bare.current_stream().wait(event)
    bare.current_stream().synchronize()
    assert BareModule.synchronized == before + 2


def test_the_hosts_generator_is_saved_where_the_device_has_none(bare: BareAccelerator) -> None:
    bare.manual_seed(5)
    state = bare.rng_state()
    first = torch.rand(4)
    bare.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    with pytest.raises(ShardingError) as caught:
        bare.set_rng_state(b"")
    assert caught.value.value == 0


def test_a_type_without_a_device_is_refused_when_chosen() -> None:
    assert device_plugin("bogus") is None
    assert device_plugin("meta") is None
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator("mtia")
    assert caught.value.value == "mtia"
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator("bogus")
    assert caught.value.value == "bogus"


def test_choose_without_torch_is_refused_as_any_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyaccel.accelerators.detect.find_spec", lambda name: None)
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator("mtia")
    assert caught.value.value == "mtia"


BACKEND = """
import torch
class Module:
    device_count = staticmethod(lambda: 3)
    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 1)
def load():
    torch.utils.rename_privateuse1_backend("paper")
    torch._register_device_module("paper", Module)
"""
ASK = """
from polyaccel.accelerators.detect import get_accelerator
paper = get_accelerator()
print(type(paper).__name__, paper.name, paper.device_count(), paper.device_name(), paper.current_device())
"""


def test_a_package_that_torch_loads_by_itself_is_chosen_by_the_devices_name(tmp_path: Path) -> None:
    info = tmp_path / "paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\npaper = paper_backend:load\n")
    (tmp_path / "paper_backend.py").write_text(BACKEND)
    environment: dict[str, Any] = {"PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "paper", "PATH": ""}
    job = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=120)
    assert job.stdout.split() == [torch_generic.GenericAccelerator.__name__, "paper", "3", "paper", "paper:1"], job
