"""What config keys print is seen in an unmodified script, once, and an application's own logging is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


SHOWN = {
    "steps_per_print": (5, ["step 5: loss ", "step 10: loss "]),
    "wall_clock_breakdown": (True, ["  host ms: data "]),
    "dump_state": (True, ["resolved config:"]),
    "comms_logger": ({"enabled": True, "verbose": True}, ["bus bandwidth"]),
}
"""Of each key, its value and what it shows."""


def test_rank_0_shows_what_the_keys_print(tmp_path: Path) -> None:
    written = run_script(tmp_path, {key: value for key, (value, _) in SHOWN.items()})
    for _, shown in SHOWN.values():
        for words in shown:
            assert any(words in line and line.startswith("[rank 0] ") for line in written.splitlines()), words
    assert "[rank 0] [polyaccel] step 5: loss " in written
    assert "[polyaccel, rank 1]" not in written


def test_log_level_hides_what_another_key_prints(tmp_path: Path) -> None:
    assert "[polyaccel" not in run_script(tmp_path, {"steps_per_print": 10, "log_level": "warning"})


def test_an_application_that_configured_logging_sees_each_line_once(tmp_path: Path) -> None:
    written = run_script(tmp_path, {"steps_per_print": 10}, own_format="mine %(name)s %(message)s")
    assert "[polyaccel" not in written
    assert written.count("[rank 0] mine polyaccel.engine.recording step 10: loss ") == 1
    for words in ("host ms: data", "resolved config:", "bus bandwidth"):
        assert words not in written, "no key asks for it"
