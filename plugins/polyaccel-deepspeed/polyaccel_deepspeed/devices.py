"""`deepspeed.accelerator.*_accelerator`: a class a device, each over polyaccel's accelerator of that device."""

from __future__ import annotations

from polyaccel.accelerators.detect import choose_accelerator
from polyaccel_deepspeed.accelerator import DeepSpeedAccelerator


class _Named(DeepSpeedAccelerator):
    """The device of a plugin's name. Raises PolyaccelError where it is not present."""

    plugin = ""

    def __init__(self) -> None:
        super().__init__(choose_accelerator(self.plugin))


class CPU_Accelerator(_Named):  # noqa: N801 - DeepSpeed's name
    """The CPU."""

    plugin = "cpu"


class CUDA_Accelerator(_Named):  # noqa: N801 - DeepSpeed's name
    """A device of NVIDIA's, or of AMD's under ROCm."""

    plugin = "cuda"


class XPU_Accelerator(_Named):  # noqa: N801 - DeepSpeed's name
    """A device of Intel's."""

    plugin = "xpu"


class MPS_Accelerator(_Named):  # noqa: N801 - DeepSpeed's name
    """A device of Apple's."""

    plugin = "mps"


class NPU_Accelerator(_Named):  # noqa: N801 - DeepSpeed's name
    """A device of Ascend's."""

    plugin = "npu"
