"""The sizes at which the check tries kernels: all of them on most devices, fewer where each is compiled by itself."""

from __future__ import annotations

import pytest

from polyaccel.accelerators.base import Accelerator, Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType
from polyaccel.testkit.accelerator import kernels
from polyaccel.testkit.accelerator.memory import BEYOND_A_CHUNK, SMALL_SIZES
from polyaccel.testkit.kernels.cases import KernelCase, kernel_cases

TYPES = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
SIZES = {*SMALL_SIZES, 61, BEYOND_A_CHUNK}


class Device(CpuAccelerator):
    compiles = False

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=TYPES, default_comm="local", mutable_buffers=not self.compiles)


class Compiling(Device):
    compiles = True


def tried_on(device: type[Device], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], set[int]]:
    tried: dict[tuple[str, str], set[int]] = {}

    def record(accelerator: Accelerator, case: KernelCase, numel: int, **settings: object) -> None:
        tried.setdefault((str(case), case.kernel), set()).add(numel)

    class Contract(kernels.KernelsContract):
        def make(self) -> Accelerator:
            return device()

    monkeypatch.setattr(kernels, "check_meaning", record)
    Contract().test_kernels_mean_what_the_reference_says()
    return tried


def test_every_case_is_tried_and_every_size_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (Device, Compiling):
        tried = tried_on(device, monkeypatch)
        assert [name for name, _ in tried] == list(map(str, kernel_cases(TYPES)))
        for kernel in {kernel for _, kernel in tried}:
            assert set().union(*(sizes for (_, one), sizes in tried.items() if one == kernel)) == SIZES


def test_a_device_that_compiles_each_length_compiles_one_for_most_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = tried_on(Compiling, monkeypatch)
    kernels_of_all = {kernel for _, kernel in tried}
    assert sum(map(len, tried.values())) == len(tried) + len(kernels_of_all) * (len(SIZES) - 1)
