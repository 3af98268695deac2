"""recipes/skypilot.yaml against SkyPilot's own schema. `make test-recipes` has the environment."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(find_spec("sky") is None, reason="SkyPilot is not installed: make test-recipes"),
    pytest.mark.filterwarnings("ignore"),  # its own, and its libraries'
]


def test_skypilot_reads_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKYPILOT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    task = import_module("sky").Task.from_yaml(str(ROOT / "recipes" / "skypilot.yaml"))
    assert (task.name, task.num_nodes, task.workdir) == ("gpt", 2, ".")
    assert "polyaccel run --hosts" in task.run
    assert task.envs == {"ARGUMENTS": "", "RANKS_PER_NODE": "2"}
