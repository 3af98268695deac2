"""Which matrix products are used: what the user says, what is measured, and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.cli.doctor.command import examine
from polyaccel.errors import ConfigError
from polyaccel.ops import matmul_autotune
from polyaccel.ops.base import GROUPED_OPS, LINEAR, LINEAR_INPUT_GRAD, MATRIX_OPS, KernelTable
from polyaccel.ops.torch import linear as torch_linear

FAST = {op.name: 1.0 for op in MATRIX_OPS} | {"linear": 2.0, "linear_input_grad": 1.1, "linear_weight_grad": 1.2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user's, and nothing known in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(matmul_autotune.VARIABLE, raising=False)
    torch_linear._faster.cache_clear()
    return tmp_path / "polyaccel"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A measurement that finds `FAST`; each one adds an entry."""
    calls: list[str] = []

    def measure(table: KernelTable) -> tuple[dict[str, float], bool]:
        calls.append("profiled")
        return dict(FAST), True

    monkeypatch.setattr(torch_linear, "measure_speedups", measure)
    return calls


def chosen() -> list[str]:
    """What another process would choose now."""
    torch_linear._faster.cache_clear()
    return [op.name for op in CpuAccelerator("torch").matrix_kernels("auto") if op in MATRIX_OPS]


def test_the_environment_goes_before_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matmul_autotune.matrix_choice("off") == "off"
    monkeypatch.setenv(matmul_autotune.VARIABLE, "on")
    assert matmul_autotune.matrix_choice("off") == "on"
    monkeypatch.setenv(matmul_autotune.VARIABLE, "yes")
    with pytest.raises(ConfigError) as caught:
        matmul_autotune.matrix_choice("auto")
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("POLYACCEL_MATRIX_KERNELS", "yes")]


def test_each_product_is_used_from_a_speedup_of_a_fifth(measured: list[str]) -> None:
    assert chosen() == ["linear", "linear_weight_grad"]
    torch_linear.faster_kernels()
    assert measured == ["profiled"]


def test_on_uses_all_without_measuring_and_off_none(measured: list[str]) -> None:
    accelerator = CpuAccelerator("torch")
    assert set(accelerator.matrix_kernels("on")) - set(GROUPED_OPS) == set(MATRIX_OPS)
    assert set(accelerator.matrix_kernels("off")) == set()
    assert set(CpuAccelerator("numpy").matrix_kernels("on")) == set()
    assert measured == []


def test_a_measurement_serves_later_processes_of_as_many_threads(measured: list[str], cache: Path) -> None:
    first = chosen()
    assert chosen() == first
    assert len(measured) == 1
    (file,) = cache.iterdir()  # no temporary one either
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        chosen()
    finally:
        torch.set_num_threads(before)
    assert len(measured) == 2
    assert {path.name for path in cache.iterdir()} > {file.name}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"format": 1}',
        b'{"format": 1, "processor": "x", "torch": "y", "threads": 1, "speedups": {"linear": 3}}',
        b'{"format": 1, "processor": "x", "torch": "y", "threads": "many", "speedups": 3}',
        b"[" * 100_000,
    ],
)
def test_a_broken_file_is_measured_again_and_replaced(content: bytes, measured: list[str], cache: Path) -> None:
    wanted = chosen()
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    assert chosen() == wanted
    assert len(measured) == 2
    assert file.read_bytes() == good


@pytest.mark.parametrize("key", ["processor", "torch", "threads", "format"])
def test_a_file_about_something_else_is_not_believed(key: str, measured: list[str], cache: Path) -> None:
    chosen()
    (file,) = cache.iterdir()
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({**tree, key: 99 if isinstance(tree[key], int) else "another"}))
    chosen()
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_none(measured: list[str], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert chosen() == chosen() == ["linear", "linear_weight_grad"]
    assert len(measured) == 2


def test_what_was_measured_while_others_used_the_cores_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(torch_linear, "measure_speedups", lambda table: (dict(FAST), False))
    assert chosen() == ["linear", "linear_weight_grad"]
    assert not cache.exists()


def test_an_op_that_cannot_run_is_not_used(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("could not create a primitive")

    table = KernelTable("broken", dict.fromkeys(MATRIX_OPS, broken))
    monkeypatch.setattr(torch_linear, "onednn_kernels", lambda: table)
    assert chosen() == []
    assert not cache.exists()


def test_a_measurement_finds_the_faster_of_two() -> None:
    """A kernel that does nothing against torch's, and one that does everything many times."""
    real = torch_linear.onednn_kernels()
    nothing = torch.zeros(1)

    def slow(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            grad @ weight
        return nothing

    table = real.replaced("odd", {LINEAR: lambda *arguments: nothing, LINEAR_INPUT_GRAD: slow})
    speedups, _ = torch_linear.measure_speedups(table, within_s=0)
    assert speedups["linear"] > 5
    assert speedups["linear_input_grad"] < 0.8
    assert set(speedups) == {op.name for op in MATRIX_OPS}


def test_doctor_says_what_is_known(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine().machine["matrix kernels"].startswith("not measured yet")
    chosen()
    line = examine().machine["matrix kernels"]
    assert "oneDNN's speed over torch's: linear 2.00, linear_input_grad 1.10, linear_weight_grad 1.20" in line
    assert "used for linear, linear_weight_grad" in line
    assert line.startswith(f"{torch.get_num_threads()} thread")
    monkeypatch.setenv(matmul_autotune.VARIABLE, "off")
    assert examine().machine["matrix kernels"] == "off (POLYACCEL_MATRIX_KERNELS)"
