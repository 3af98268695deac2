"""The accelerator plugin: polyaccel's own host accelerator with other kernels in its table."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

from polyaccel.accelerators.base import Probe
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.ops.base import KernelTable

_PACKAGES = ("torch", "intel-extension-for-pytorch")


@cache
def _fused(table: KernelTable) -> KernelTable:
    from polyaccel_ipex.kernels import ipex_kernels

    return ipex_kernels(table)


class IpexAccelerator(CpuAccelerator):
    """The host, with the extension's fused optimizer steps where they keep the contract of kernels."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 0)
    name: ClassVar[str] = "ipex"

    def __init__(self) -> None:
        super().__init__("torch")

    @classmethod
    def probe(cls) -> Probe:
        # Above the plain host: who installs this package wants it. On another torch the extension cannot be imported.
        found = {}
        for package in _PACKAGES:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                return Probe(False, f"{package} is not installed", priority=1)
        series = {name: ".".join(number.split(".")[:2]) for name, number in found.items()}
        reason = " and ".join(f"{name} {number}" for name, number in found.items())
        if len(set(series.values())) > 1:
            return Probe(False, f"{reason} do not fit together", priority=1)
        return Probe(True, reason, priority=1)

    def kernels(self) -> KernelTable:
        return _fused(super().kernels())
