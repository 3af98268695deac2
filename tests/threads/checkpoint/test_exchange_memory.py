"""An export or an import takes the memory of a few tensors and not of the model, and tells how far it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from exchange_memory_job import COUNT, NUMEL

ROOT = Path(__file__).parents[3]
JOB = ROOT / "tests" / "support" / "saves" / "exchange_memory_job.py"
TENSOR_NBYTES = 4 * NUMEL
MOST = {("dcp", "import"): 7}
"""Tensors of a model of 24 that are in memory at once: else three, as one is read, converted and handed over. torch's
library holds one as a file's bytes and as a tensor, and copies it."""
FORMATS = ["safetensors", "bin", "dcp", "deepspeed", "reshard"]


@pytest.mark.skipif(sys.platform != "linux", reason="this system does not tell which memory is no file's")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_memory_is_that_of_a_tensor_and_progress_tells_every_byte(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "plugins" / "polyaccel-deepspeed"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path), *FORMATS],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["format"], row["what"]) for row in rows] == [
        *((name, what) for name in FORMATS[:-1] for what in ("export", "import")),
        ("reshard", "export"),
    ]
    for row in rows:
        kinds = 1 if row["format"] in ("safetensors", "bin") else 2
        assert row["told"] == kinds * COUNT * TENSOR_NBYTES, row
        most = MOST.get((row["format"], row["what"]), 3)
        assert row["peak"] < most * TENSOR_NBYTES + 4 * 2**20, row
