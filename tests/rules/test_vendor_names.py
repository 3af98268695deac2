"""Devices and vendors are the business of plugins: outside the rooms of accelerators, backends and kernels no file
names one, but for those listed here with their reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "polyaccel"
ROOMS = ("accelerators", "comm", "ops")
NAMES = re.compile(
    r"(?<![a-z])(cuda|nvidia|rocm|amd|xpu|intel|npu|ascend|habana|gaudi|hpu|mps|apple|tpu|triton|ipex|simdev|"
    r"nccl|rccl|xccl|hccl|ccl|oneccl)(?![a-z])",
    re.IGNORECASE,
)
EXCEPTIONS = {
    "cli/build.py": "compiles the part of a comm backend that its user names",
    "cli/doctor/libraries.py": "says which vendors' packages, libraries and variables are there",
    "config/unsupported_keys.py": "a key of DeepSpeed's JSON, enable_cuda_graph",
    "launch/commands/mpi.py": "each MPI's command line, under its own name",
    "torch/profiling/operations.py": "an operation of torch, _lstm_mps",
    "torch/fsdp/sharded.py": "attributes of torch's tensors, is_cuda and its like",
}
FILES = sorted(
    file.relative_to(PACKAGE).as_posix()
    for file in PACKAGE.rglob("*")
    if file.suffix in (".py", ".txt") and file.relative_to(PACKAGE).parts[0] not in ROOMS
)


def named(file: str) -> list[str]:
    """The lines of `file` that name a device or a vendor."""
    lines = (PACKAGE / file).read_text(encoding="utf-8").splitlines()
    return [f"{file}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if NAMES.search(line)]


def test_the_rule_sees_names_in_identifiers_and_texts() -> None:
    for line in ("import torch_npu", "x.is_cuda", "CUDA_VISIBLE_DEVICES", "on NVIDIA's GPUs", "nccl"):
        assert NAMES.search(line), line
    for line in ("stamps", "example", "precision", "amdahl", "cclose", "inputs"):
        assert not NAMES.search(line), line


def test_no_file_names_a_device_or_a_vendor() -> None:
    assert [line for file in FILES if file not in EXCEPTIONS for line in named(file)] == []


@pytest.mark.parametrize("file", EXCEPTIONS)
def test_an_exception_is_one(file: str) -> None:
    assert named(file)
