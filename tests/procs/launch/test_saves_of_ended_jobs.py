"""A job that is ended because a rank was killed: the save that was under way counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.checkpoint import list_checkpoints
from polyaccel.checkpoint.save.async_client import can_save_in_background

pytestmark = pytest.mark.skipif(not can_save_in_background(), reason="saves in the background need Linux")
LIMIT_S = 240.0
SCRIPT = """
import os, signal, sys
import torch
import polyaccel
from polyaccel.checkpoint.save import async_client

config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = polyaccel.initialize(model=torch.nn.Linear(64, 64), config=config)
engine.backward(engine(torch.ones(1, 64)).square().mean())
engine.step()
engine.save_checkpoint(sys.argv[1], tag="first")
engine.wait_for_checkpoint()
# The processes that write are stopped, until the launcher, which asks all processes to end, lets stopped ones go on.
os.kill(async_client.owner().pid, signal.SIGSTOP)
engine.save_checkpoint(sys.argv[1])
engine.communicator.barrier()
if engine.communicator.rank == int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
signal.alarm(100)
signal.pause()
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_what_killed_ranks_have_handed_over_is_written(killed: int, tmp_path: Path) -> None:
    script, saves = tmp_path / "script.py", tmp_path / "saves"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", "--grace-period", "60", script, saves, str(killed)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 137, done.stderr
    newest, first = list_checkpoints(saves)
    assert [(each.tag, each.problem) for each in (newest, first)] == [("global_step1", ""), ("first", "")]
