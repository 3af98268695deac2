"""Every stage, and states on the host, train alike on each accelerator but the CPU that is present here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from present import each_device, need

from polyaccel.registry import PluginStatus

HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}

SCRIPT = """
import json, sys, torch, polyaccel
found = []
for zero in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 33), torch.nn.GELU(), torch.nn.Linear(33, 5))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"reduce_bucket_size": 500, **zero},
    }
    engine, *_ = polyaccel.initialize(model=model, config=config)
    draws, losses = torch.Generator().manual_seed(1), []
    for _ in range(4):
        x, y = torch.randn(8, 24, generator=draws), torch.randint(0, 5, (8,), generator=draws)
        loss = torch.nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found.append(losses)
    engine.destroy()
print("RESULT", json.dumps(found))
"""


def losses_of(name: str, settings: list[dict[str, object]]) -> list[list[float]]:
    job = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(settings)],
        env={**os.environ, "DS_ACCELERATOR": name},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    found: list[list[float]] = json.loads(job.stdout.partition("RESULT ")[2].splitlines()[0])
    return found


@each_device
def test_stages_and_places_of_states_train_alike(status: PluginStatus) -> None:
    need(status)
    stages: list[dict[str, object]] = [{"stage": stage} for stage in range(4)]
    found = losses_of(status.info.name, [*stages, {"stage": 2, **HOST}, {"stage": 3, **HOST}])
    first = found[0]
    assert [index for index, losses in enumerate(found[:4]) if losses != first] == []
    for losses in found[4:]:
        assert losses == pytest.approx(first, rel=1e-5)
    (host,) = losses_of("cpu", stages[2:3])
    assert first == pytest.approx(host, rel=1e-4)
