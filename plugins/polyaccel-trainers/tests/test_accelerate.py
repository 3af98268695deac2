"""Accelerate over polyaccel on two gloo ranks, next to plain torch in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import accelerate_job
import pytest
import torch
from safetensors.torch import load_file

JOB = Path(__file__).parent / "accelerate_job.py"


def run(job: Path, *arguments: str) -> None:
    """Run a job on two ranks, as `torchrun` starts them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(job)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (2, 2), (3, 1)])
def test_losses_and_weights_are_those_of_one_process(stage: int, accumulation: int, tmp_path: Path) -> None:
    """Clipping, a schedule, a resumed run, and the weights that Accelerate saves."""
    run(JOB, str(stage), str(accumulation), "no", str(tmp_path))
    losses, weights = accelerate_job.reference(accumulation)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    assert found["again"] == found["losses"][3:]
    for saved in (torch.load(tmp_path / "weights.pt"), load_file(tmp_path / "model" / "model.safetensors")):
        assert saved.keys() == weights.keys()
        for name, one in weights.items():
            torch.testing.assert_close(saved[name], one, rtol=1e-5, atol=1e-6)
