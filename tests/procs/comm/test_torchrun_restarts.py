"""Ranks that torchrun starts again meet each other, and nobody of the start before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.job.ports import free_port

SCRIPT = """
import os, torch, polyaccel.comm as comm
comm.init_distributed(timeout=100)
value = torch.tensor([comm.get_rank() + 1.0])
comm.all_reduce(value)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and comm.get_rank() == 1:
    os._exit(3)
comm.all_reduce(value)
with open(f"sum{comm.get_rank()}", "w") as file:
    file.write(f"{value.item()}")
"""


@pytest.mark.parametrize("by_agent", ["standalone", "static"])
def test_a_start_after_a_failure_trains_over_gloo(by_agent: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    where = ["--standalone"] if by_agent == "standalone" else ["--master-port", str(free_port())]
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", *where, "train.py"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**inherited, "POLYACCEL_COMM": "gloo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(2)] == ["6.0", "6.0"]
