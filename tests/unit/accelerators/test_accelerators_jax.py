"""Devices that only JAX knows: found by the platform's name, buffers as handles, kernels, and training in native mode.

There is no foreign PJRT device here: the client of the host's processor stands for one, under another name where it is
found by that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.accelerators.jax_device import JaxAccelerator
from polyaccel.accelerators.jax_generic import GenericJaxAccelerator, device_plugin
from polyaccel.core.types import DType
from polyaccel.errors import PluginContractError, PluginNotFound
from polyaccel.ops.base import CAST, QUANTIZE, UPDATE
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.testkit.accelerator import AcceleratorContract
from polyaccel.testkit.kernels.cases import KernelCase, kernel_cases
from polyaccel.testkit.kernels.contract import check_meaning, check_square_sums, check_stochastic_rounding

_CASES = [
    case for case in kernel_cases(frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})) if case.call_rounding
]
_UPDATES = {case.kernel: case for case in _CASES if case.op is not CAST}
ROUNDED = [*(case for case in _CASES if case.op is CAST), *_UPDATES.values()]
"""Every cast, and one update of each optimizer."""
PROGRAM = Path(__file__).parents[2] / "support" / "jobs" / "native_on_a_plugin.py"


def make() -> JaxAccelerator:
    plugin = device_plugin("cpu")
    assert plugin is not None
    return plugin()


class TestJaxDevice(AcceleratorContract):
    def make(self) -> JaxAccelerator:
        return make()

    @pytest.mark.skip(reason="each size of each type is a program to compile")
    def test_parts_at_odd_places_are_filled_and_copied(self) -> None: ...

    @pytest.mark.skip(reason="each size is a program to compile: one of each case below")
    def test_kernels_mean_what_the_reference_says(self) -> None: ...

    @pytest.mark.skip(reason="each size is a program to compile: one below")
    def test_square_sums_are_exact_and_see_overflow(self) -> None: ...

    @pytest.mark.skip(reason="each size is a program to compile: one of each case below")
    def test_stochastic_rounding_is_the_reference_s(self) -> None: ...


@pytest.mark.parametrize("case", kernel_cases(frozenset({DType.FLOAT32, DType.BFLOAT16})), ids=str)
def test_kernels_mean_what_the_reference_says(case: KernelCase) -> None:
    check_meaning(make(), case, 61, finite=False, offset=3)


@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_stochastic_rounding_is_the_reference_s(case: KernelCase) -> None:
    check_stochastic_rounding(make(), case, 61)


def test_square_sums_are_exact_and_see_overflow() -> None:
    check_square_sums(make(), DType.FLOAT32, (1 << 18) + 38)


def test_what_a_device_lacks_is_reported() -> None:
    capabilities = make().capabilities()
    assert [note.partition(":")[0] for note in capabilities.notes] == [
        "arrays never change",
        "quantises nothing",
        "no numbers on memory",
        "no generator",
        "no collectives outside programs of JAX",
    ]
    assert not capabilities.mutable_buffers
    assert DType.FLOAT64 not in capabilities.dtypes  # without jax_enable_x64
    assert {DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT32, DType.BOOL} <= capabilities.dtypes


def test_a_kernel_gives_up_the_arrays_that_it_replaces() -> None:
    accelerator = make()
    master, grad, mean, square = (accelerator.allocate(64, DType.FLOAT32) for _ in range(4))
    before = master.raw, mean.raw, square.raw
    kept = grad.raw
    rule = OPTIMIZERS["Adam"].rule({"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}, 1)
    accelerator.kernels()[UPDATE](rule, master, grad, [mean, square])
    assert all(array.is_deleted() for array in before)
    assert not kept.is_deleted()


def test_what_it_cannot_do_is_refused() -> None:
    accelerator = make()
    with pytest.raises(PluginContractError) as caught:
        accelerator.kernels()[QUANTIZE]
    assert caught.value.value == "quantize"
    with pytest.raises(PluginContractError) as caught:
        accelerator.import_array(np.zeros(3))
    assert caught.value.value == "numpy.ndarray"
    imported = accelerator.import_array(jax.numpy.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(imported.raw, np.arange(6.0))


def test_names_that_jax_does_not_know() -> None:
    assert device_plugin("bogus") is None
    with pytest.raises(PluginNotFound) as caught:
        choose_accelerator("bogus")
    assert caught.value.value == "bogus"
    assert "JAX" in str(caught.value)


PLUGIN = """
from jax._src import xla_bridge
def initialize():
    xla_bridge.register_backend_factory("paper", xla_bridge.make_cpu_client, priority=-1)
"""


@pytest.mark.timeout(420)
def test_a_platform_of_a_jax_plugin_is_chosen_by_name_and_trains(tmp_path: Path) -> None:
    """A package with the entry point `jax_plugins`, and nothing of ours in it."""
    info = tmp_path / "paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jax_plugins]\npaper = paper_plugin\n")
    (tmp_path / "paper_plugin.py").write_text(PLUGIN)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "DS_ACCELERATOR": "paper",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    job = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == [GenericJaxAccelerator.__name__, "paper", "2", "trained"], job

    doctor = [sys.executable, "-m", "polyaccel", "doctor", "--json"]
    report = subprocess.run(doctor, env=environment, capture_output=True, text=True, timeout=100)
    found = json.loads(report.stdout)
    assert (found["accelerator"], found["can_train"]) == ("paper", True), report
    assert any("native mode" in note for note in found["accelerator_notes"]), report
