"""Huawei's Ascend NPUs, by torch_npu. Written against its documentation; not run on hardware."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Capabilities, Probe
from polyaccel.accelerators.torch_device import TorchAccelerator
from polyaccel.core.types import DType

_DEVICES = "/dev/davinci[0-9]*"


class NpuAccelerator(TorchAccelerator):
    """`torch.npu`, which the package torch_npu adds, with HCCL. Not run on hardware."""

    name: ClassVar[str] = "npu"
    torch_device_type: ClassVar[str] = "npu"
    extension: ClassVar[str | None] = "torch_npu"
    visible_devices_variable: ClassVar[str | None] = "ASCEND_RT_VISIBLE_DEVICES"
    exported_variables: ClassVar[tuple[str, ...]] = ("ASCEND_", "HCCL_", "ACL_")

    @classmethod
    def probe(cls) -> Probe:
        torch = device_probe.loaded_torch()
        if torch is not None and hasattr(torch, "npu") and (answer := device_probe.ask_torch("npu")) is not None:
            return answer
        if (device := device_probe.first_existing([_DEVICES])) is None:
            return device_probe.unusable(f"no Ascend NPU: no {_DEVICES}")
        if find_spec("torch") is None or find_spec("torch_npu") is None:
            return device_probe.unusable(f"{device} exists, but torch and torch_npu are not both installed")
        return device_probe.usable(f"{device} exists and torch_npu is installed")

    def capabilities(self) -> Capabilities:
        # Ascend cores compute float64 slowly or by fallback to the host; the engine does not count on it.
        return Capabilities(
            dtypes=frozenset(DType) - {DType.FLOAT64}, default_comm="hccl", streams=True, host_pinning=True
        )
