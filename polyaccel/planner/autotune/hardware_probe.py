"""How fast this machine updates, copies and reads files: measured with the kernels that a training would use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import choose_accelerator, host_accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.ops.base import UPDATE
from polyaccel.ops.optimizers import OPTIMIZERS

_NUMEL = 1 << 22
_SIDE = 512
_ROUNDS = 5
_FILE_NBYTES = 32 << 20
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class HardwareRates:
    """Seconds that an element's update takes on the device and on the host, and a byte on its way between the two, and
    between memory and a file. The last one is written and read. `operation_s` is that of an operation in a product of
    matrices on the device."""

    update_device_s: float
    update_host_s: float
    link_s: float
    file_s: float
    operation_s: float = 1e-13


USUAL = HardwareRates(1e-10, 1e-9, 1e-10, 1e-9)
"""Without measurements: a device of 300 GB/s and 10 TFLOP/s, a host of 30 GB/s, a link of 10 and a disk of 1."""


def measured_rates(accelerator: Accelerator, folder: Path | None = None) -> HardwareRates:
    """Measure rates of `accelerator`, host and the disk of `folder`, in about a second."""
    host = host_accelerator(accelerator)
    device_s = _update_s(accelerator)
    host_s = device_s if host is accelerator else _update_s(host)
    link_s = 0.0 if host is accelerator else _link_s(accelerator, host)
    operation_s = _operation_s() if host is accelerator else USUAL.operation_s
    return HardwareRates(device_s, host_s, link_s, _file_s(folder), operation_s)


def rates_here(folder: Path) -> HardwareRates:
    """Measure the chosen accelerator's rates in a separate process; `USUAL` where it fails."""
    command = [sys.executable, "-m", __name__, str(folder)]
    with suppress(OSError, subprocess.SubprocessError, ValueError, TypeError):
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=True, text=True)
        return HardwareRates(**json.loads(done.stdout.splitlines()[-1]))
    return USUAL


def _update_s(accelerator: Accelerator) -> float:
    """Of an element under AdamW in float32."""
    rule = OPTIMIZERS["AdamW"].rule({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, 1)
    update, buffers = accelerator.kernels()[UPDATE], [_zeros(accelerator) for _ in range(4)]
    weights, gradient, *states = buffers
    return _timed(accelerator, lambda: update(rule, weights, gradient, tuple(states), None, 1.0)) / _NUMEL


def _operation_s() -> float:
    """Of an operation in a product of matrices on the host, by numpy."""
    matrix = np.ones((_SIDE, _SIDE), np.float32)
    found = []
    for _ in range(_ROUNDS + 1):
        began = perf_counter()
        np.matmul(matrix, matrix)
        found.append(perf_counter() - began)
    return median(found[1:]) / (2 * _SIDE**3)


def _link_s(accelerator: Accelerator, host: Accelerator) -> float:
    """Of a byte from host memory to the device."""
    here, there = host.allocate(_NUMEL, DType.FLOAT32, pinned=True), _zeros(accelerator)
    here.fill(0.0)
    return _timed(accelerator, lambda: there.copy_from(here)) / here.nbytes


def _zeros(accelerator: Accelerator) -> Buffer:
    buffer = accelerator.allocate(_NUMEL, DType.FLOAT32)
    buffer.fill(0.0)
    return buffer


def _timed(accelerator: Accelerator, run: Callable[[], object]) -> float:
    """The median seconds of `run`, after a first time that does not count."""
    found = []
    for _ in range(_ROUNDS + 1):
        accelerator.synchronize()
        began = perf_counter()
        run()
        accelerator.synchronize()
        found.append(perf_counter() - began)
    return median(found[1:])


def _file_s(folder: Path | None) -> float:
    """Of a byte that is written to a file, to the disk itself, and read again."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        data = bytes(_FILE_NBYTES)
        began = perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.read()
        return (perf_counter() - began) / (2 * _FILE_NBYTES)
    return USUAL.file_s


if __name__ == "__main__":
    print(json.dumps(asdict(measured_rates(choose_accelerator(None), Path(sys.argv[1])))))
