"""The compiled kernels of every device that is present here round as the host's do."""

from __future__ import annotations

import numpy as np
import pytest
from present import each_device, need

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.core.types import DType
from polyaccel.ops.base import UPDATE
from polyaccel.ops.native import native
from polyaccel.registry import PluginStatus
from polyaccel.testkit.kernels.cases import kernel_cases
from polyaccel.testkit.kernels.contract import encode

FUSED = [
    case
    for case in kernel_cases(frozenset(DType))
    if case.name.split()[0] not in ("combine", "scale") and DType.FLOAT64 not in {a.dtype for a in case.arguments}
]


@pytest.mark.skipif(native().library is None, reason=native().reason)
@np.errstate(all="ignore")
@each_device
def test_bits_are_those_of_the_host(status: PluginStatus) -> None:
    need(status)
    device, host = choose_accelerator(status.info.name), CpuAccelerator("torch")
    provider = device.kernels().provider(UPDATE)
    if not provider.startswith("triton "):
        pytest.skip(f"{status.info.name}: {provider} computes, whose bits are its own")
    numel, differing = 5001, []  # more than one program
    for case in FUSED:
        draw, contents, after = np.random.default_rng(7), [], []
        for argument in case.arguments:
            values = (
                np.abs(draw.standard_normal(numel)) if argument.role == "magnitude" else draw.standard_normal(numel)
            )
            contents.append(encode(values * 2.0 ** draw.integers(-30, 12, numel), argument.dtype))
        for accelerator in (device, host):
            buffers = [accelerator.allocate(numel, argument.dtype) for argument in case.arguments]
            for buffer, data in zip(buffers, contents, strict=True):
                buffer.from_bytes(data)
            case.call(accelerator.kernels(), buffers)
            after.append([b.to_bytes() for b, a in zip(buffers, case.arguments, strict=True) if a.role != "grad"])
        if after[0] != after[1]:
            differing.append(case.name)
    assert differing == []
