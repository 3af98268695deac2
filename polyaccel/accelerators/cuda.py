"""NVIDIA GPUs, and AMD's under torch's ROCm build, which calls them cuda too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import ClassVar

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Capabilities, Probe
from polyaccel.accelerators.torch_device import TorchAccelerator
from polyaccel.core.types import DType
from polyaccel.ops.base import KernelTable

_NVIDIA = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libnvidia-ml.so*")
_AMD = ("/dev/kfd",)


@cache
def _kernels() -> KernelTable:
    from polyaccel.ops.torch.kernels import torch_kernels

    table = torch_kernels()
    if find_spec("triton") is None:  # it comes with torch's builds for GPUs, but not on every system
        return table
    from polyaccel.ops.triton.torch_table import triton_kernels

    return triton_kernels(table, "cuda")


class CudaAccelerator(TorchAccelerator):
    """`torch.cuda` with NCCL (RCCL on ROCm)."""

    name: ClassVar[str] = "cuda"
    torch_device_type: ClassVar[str] = "cuda"
    visible_devices_variable: ClassVar[str | None] = "CUDA_VISIBLE_DEVICES"
    exported_variables: ClassVar[tuple[str, ...]] = ("CUDA_", "NCCL_", "NVSHMEM_", "HIP_", "HSA_")

    @classmethod
    def probe(cls) -> Probe:
        if (hidden := device_probe.hidden_by("CUDA_VISIBLE_DEVICES")) is not None:
            return device_probe.unusable(hidden)
        if (answer := device_probe.ask_torch("cuda")) is not None:
            return answer
        nvidia, amd = device_probe.first_existing(_NVIDIA), device_probe.first_existing(_AMD)
        if nvidia is None and amd is None:
            return device_probe.unusable(f"no GPU: none of {', '.join(_NVIDIA + _AMD)} exists")
        toolkits = tuple(name for name, found in (("cuda", nvidia), ("hip", amd)) if found is not None)
        if (lack := device_probe.built_for(*toolkits)) is not None:
            return device_probe.unusable(f"{nvidia or amd} exists, but {lack}")
        return device_probe.usable(f"{nvidia or amd} exists")

    def capabilities(self) -> Capabilities:
        dtypes = set(DType)
        if not self._module.is_bf16_supported(including_emulation=False):
            dtypes.remove(DType.BFLOAT16)
        return Capabilities(dtypes=frozenset(dtypes), default_comm="nccl", streams=True, host_pinning=True, graphs=True)

    def kernels(self) -> KernelTable:
        return _kernels()

    def record_work(self, work: Callable[[], None]) -> Callable[[], None]:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of data loaders call CUDA meanwhile, which the default mode would take for mistakes.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        play: Callable[[], None] = graph.replay
        return play
