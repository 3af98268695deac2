"""The simulated device as one that torch supports and no plugin is for: the generic accelerator drives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polyaccel_simdev.device  # noqa: F401 - torch has the device from here on
import pytest

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_generic import device_plugin
from polyaccel.testkit.accelerator import AcceleratorContract

OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}
SETTINGS: dict[str, Any] = {str(stage): ({"stage": stage}, {}, False) for stage in range(4)}
SETTINGS["3, host"] = ({"stage": 3, **OFFLOADED}, {}, False)

GENERIC = """
import runpy, sys
import polyaccel_simdev.device
from polyaccel.accelerators.detect import set_accelerator
from polyaccel.accelerators.torch_generic import device_plugin
set_accelerator(device_plugin("simdev")())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def generic() -> Accelerator:
    plugin = device_plugin("simdev")
    assert plugin is not None
    return plugin()


class TestGeneric(AcceleratorContract):
    def make(self) -> Accelerator:
        return generic()


def test_what_torch_has_of_it_is_found() -> None:
    capabilities = generic().capabilities()
    assert capabilities.streams
    assert capabilities.host_pinning
    assert capabilities.default_comm == "simcomm"  # as it was registered with torch.distributed
    assert capabilities.notes == ()


@pytest.mark.parametrize("comm", [None, "gloo"])
def test_it_trains(comm: str | None, tmp_path: Path) -> None:
    script = tmp_path / "generic.py"
    script.write_text(GENERIC.replace("sys.argv[0]", repr(str(Path(__file__).with_name("train.py")))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"POLYACCEL_COMM": comm} if comm else {})}
    job = subprocess.run(
        [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", str(script), json.dumps(SETTINGS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line for line in job.stdout.splitlines() if "RESULT" in line]
    assert (job.returncode, len(lines)) == (0, 1), job.stdout + job.stderr
    runs = json.loads(lines[0].partition("RESULT ")[2])["runs"]
    first = runs.pop("0")
    on_host = runs.pop("3, host")
    assert [name for name, run in runs.items() if run != first] == []
    assert on_host["losses"] == pytest.approx(first["losses"], rel=1e-5)
