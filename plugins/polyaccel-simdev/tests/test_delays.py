"""Work of streams that is held back at random changes no bit, and what lacks an event or a `record_stream` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_training import BF16, EXPERTS, OFFLOADED, PARAMS_TOO

HERE = Path(__file__).parent
SHARDED = {"stage3_param_persistence_threshold": 0}
EARLY = {"gradient_clipping": 0.0}
TWICE = {**BF16, "gradient_accumulation_steps": 2}
SETTINGS: dict[str, tuple[Any, Any, bool]] = {
    **{str(stage): ({"stage": stage, **(SHARDED if stage == 3 else {})}, {}, False) for stage in range(4)},
    "1, host": ({"stage": 1, **OFFLOADED}, BF16, False),
    "2, host": ({"stage": 2, **OFFLOADED}, {}, False),
    "2, host, twice": ({"stage": 2, **OFFLOADED}, TWICE, False),
    "3, host": ({"stage": 3, **OFFLOADED, **SHARDED}, BF16, False),
    "3, host, parameters too": ({"stage": 3, **PARAMS_TOO, **SHARDED}, {}, False),
}
ALONE: dict[str, tuple[Any, Any, bool]] = {
    f"{stage}, host, early": ({"stage": stage, **OFFLOADED}, EARLY, False) for stage in (1, 2)
}
WITH_EXPERTS: dict[str, tuple[Any, Any]] = {
    "experts": ({"stage": 2}, EXPERTS),
    "experts, host": ({"stage": 2, **OFFLOADED}, {**EXPERTS, **BF16}),
}
WITHOUT_OVERLAP: dict[str, tuple[Any, Any, bool]] = {
    "2, host, without overlap": ({"stage": 2, "overlap_comm": False, **OFFLOADED}, EARLY, False)
}
GRADIENTS = "polyaccel.zero.buckets.gradients"
MUTANTS = {
    "a copy does not wait for the gradient": (GRADIENTS, "stream.wait(launched)", WITHOUT_OVERLAP),
    "the device overwrites a gradient that is being copied": (
        GRADIENTS,
        "self._accelerator.current_stream().wait(stream.record())",
        ALONE,
    ),
}


def run(world: int, settings: dict[str, Any], seed: int, script: str, *mutant: str) -> subprocess.CompletedProcess[str]:
    """Train with delays of a seed (0: none), with a line of a module (`mutant`) left out."""
    command = [str(HERE / script), json.dumps(settings)]
    if mutant:
        module, line = mutant
        command = [str(HERE / "mutated.py"), module, line, "pass", *command]
    return subprocess.run(
        [sys.executable, "-m", "polyaccel", "run", "--nproc", str(world), *command],
        env={**os.environ, "DS_ACCELERATOR": "simdev", "OMP_NUM_THREADS": "1", "POLYACCEL_SIMDEV_DELAYS": str(seed)},
        capture_output=True,
        text=True,
        timeout=280,
    )


def found(job: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the script printed of each setting."""
    lines = [line for line in job.stdout.splitlines() if "RESULT" in line]
    assert (job.returncode, len(lines)) == (0, 1), job.stdout + job.stderr
    return dict(json.loads(lines[0].partition("RESULT ")[2])["runs"])


@pytest.mark.parametrize(
    ("world", "settings", "script"),
    [(2, SETTINGS, "train.py"), (1, ALONE, "train.py"), (2, WITH_EXPERTS, "train_transformers.py")],
    ids=["stages", "one rank", "experts"],
)
def test_delays_change_nothing(world: int, settings: dict[str, Any], script: str) -> None:
    assert found(run(world, settings, 1, script)) == found(run(world, settings, 0, script))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_event_changes_the_numbers(name: str) -> None:
    module, line, settings = MUTANTS[name]
    whole = found(run(1, settings, 0, "train.py"))
    for seed in (1, 2, 3):
        job = run(1, settings, seed, "train.py", module, line)
        if job.returncode or found(job) != whole:
            return
    pytest.fail(f"nothing changed although {name}")


RECORDS = """
import sys, torch, polyaccel_simdev.device
from polyaccel_simdev import _device
_device.set_delays(0)
host = torch.zeros(1000).pin_memory()
other = torch.Stream(device="simdev")
values = torch.full((1000,), 3.0, device="simdev")
torch.simdev.synchronize()
_device.set_delays(int(sys.argv[1]))
with other:
    _device.keep_busy(200, 0)
    host.copy_(values, non_blocking=True)
if sys.argv[2] == "record":
    values.record_stream(other)
del values
kept = torch.full((1000,), 5.0, device="simdev")
torch.simdev.synchronize()
print(sorted(set(host.tolist())))
"""


@pytest.mark.parametrize(("mode", "values"), [("record", "[3.0]"), ("forget", "[5.0]")])
def test_freed_memory_waits_for_the_streams_that_are_recorded(mode: str, values: str) -> None:
    job = subprocess.run(
        [sys.executable, "-c", RECORDS, "1", mode], capture_output=True, text=True, timeout=100, check=True
    )
    assert job.stdout.strip() == values
