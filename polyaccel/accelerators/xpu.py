"""Intel GPUs, by torch's own xpu device. Written against torch's documentation; not run on hardware."""

from __future__ import annotations

from typing import ClassVar

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Capabilities, Probe
from polyaccel.accelerators.torch_device import TorchAccelerator
from polyaccel.core.types import DType


class XpuAccelerator(TorchAccelerator):
    """`torch.xpu` with XCCL. Not run on hardware."""

    name: ClassVar[str] = "xpu"
    torch_device_type: ClassVar[str] = "xpu"
    visible_devices_variable: ClassVar[str | None] = "ZE_AFFINITY_MASK"
    exported_variables: ClassVar[tuple[str, ...]] = ("ZE_", "SYCL_", "ONEAPI_", "CCL_", "FI_")

    @classmethod
    def probe(cls) -> Probe:
        if (answer := device_probe.ask_torch("xpu")) is not None:
            return answer
        if (node := device_probe.intel_render_node()) is None:
            return device_probe.unusable("no Intel GPU: no /dev/dri/renderD* of vendor 0x8086")
        if (lack := device_probe.built_for("xpu")) is not None:
            return device_probe.unusable(f"{node} is Intel's, but {lack}")
        return device_probe.usable(f"{node} is Intel's")

    def capabilities(self) -> Capabilities:
        dtypes = set(DType)
        if not self._module.get_device_properties().has_fp64:  # Arc has no float64
            dtypes.remove(DType.FLOAT64)
        return Capabilities(dtypes=frozenset(dtypes), default_comm="xccl", streams=True, host_pinning=True)
