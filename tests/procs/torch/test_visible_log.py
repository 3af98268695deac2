"""What config keys print is seen in an unmodified script, once, and an application's own logging is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """\
import json, logging, sys
import torch
import polyaccel

if sys.argv[2]:
    logging.basicConfig(format=sys.argv[2], level=logging.INFO)
engine, *_ = polyaccel.initialize(model=torch.nn.Linear(4, 2), config=json.loads(sys.argv[1]))
for _ in range(10):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
engine.destroy()
polyaccel.comm.destroy_process_group()
"""
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def run_script(folder: Path, keys: dict[str, Any], *, own_format: str = "") -> str:
    """What two ranks of the script write to their errors' stream; each line begins with `[rank N] `."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", str(script), json.dumps(CONFIG | keys)]
    environment = {name: value for name, value in os.environ.items() if name != "POLYACCEL_LOG"}
    done = subprocess.run(
        [*command, own_format], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"steps_per_print": 5}, ["step 5: loss ", "step 10: loss "]),
        ({"wall_clock_breakdown": True}, ["step 10: loss ", "  host ms: data "]),
        ({"dump_state": True}, ["resolved config:"]),
        ({"comms_logger": {"enabled": True, "verbose": True}}, ["bus bandwidth"]),
        ({"steps_per_print": 10, "log_level": "warning"}, []),
    ],
    ids=["steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger.verbose", "log_level"],
)
def test_rank_0_shows_what_the_key_prints(keys: dict[str, Any], shown: list[str], tmp_path: Path) -> None:
    written = run_script(tmp_path, keys)
    for words in shown:
        assert f"[rank 0] [polyaccel] {words}" in written or (words in written and "[rank 0] [polyaccel]" in written)
    assert shown or "[polyaccel" not in written
    assert "[polyaccel, rank 1]" not in written


def test_an_application_that_configured_logging_sees_each_line_once(tmp_path: Path) -> None:
    written = run_script(tmp_path, {"steps_per_print": 10}, own_format="mine %(name)s %(message)s")
    assert "[polyaccel" not in written
    assert written.count("[rank 0] mine polyaccel.engine.recording step 10: loss ") == 1
