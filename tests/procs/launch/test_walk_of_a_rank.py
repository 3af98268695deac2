"""A rank passes the functions that docs/walks.toml lists, from `polyaccel run` to its first collective."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from called_functions import differences

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

from architecture import read_walks  # noqa: E402

LAUNCHER = """
import json, sys
from called_functions import called_functions
from polyaccel.cli.main import main
with called_functions() as calls:
    code = main(["run", "--nproc", "2", sys.argv[1], sys.argv[2]])
with open(sys.argv[2] + "/launcher.json", "w") as file:
    json.dump(calls, file)
sys.exit(code)
"""
RANK = """
import json, sys
import torch
import polyaccel
from called_functions import called_functions
with called_functions() as calls:
    polyaccel.init_distributed()
    polyaccel.comm.all_reduce(torch.ones(3))
with open(f"{sys.argv[1]}/rank{polyaccel.comm.get_rank()}.json", "w") as file:
    json.dump(calls, file)
polyaccel.comm.destroy_process_group()
"""


def test_a_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    command = [sys.executable, "-c", LAUNCHER, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    walk = next(walk for walk in read_walks() if walk["name"] == "rank")
    calls = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("launcher", "rank0", "rank1")}
    calls = {name: [(file, line) for file, line in found] for name, found in calls.items()}
    assert differences(walk["steps"], calls["launcher"]) == []
    for rank in ("rank0", "rank1"):
        assert differences(walk["rank_steps"], calls[rank]) == []
