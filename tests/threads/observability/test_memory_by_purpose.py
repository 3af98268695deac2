"""The timeline of memory: what a rank's buffers are for, beside what the planner foretold, at every stage and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads

EXACT = ("parameters", "master weights", "optimizer states", "gradients")
BOUNDED = ("gradient buckets in flight", "gathered parameters", "staging of offloaded states")
STEPS = 4


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "memory_nbytes" in line]


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (1, {"bf16": {"enabled": True}}),
        (2, {"gradient_accumulation_steps": 2}),
        (2, {"zero": {"offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}),
        (3, {"bf16": {"enabled": True}}),
    ],
    ids=["stage0", "stage1-bf16", "stage2-accumulating", "stage2-offload", "stage3-bf16"],
)
def test_purposes_are_counted_beside_what_was_foretold(stage: int, more: dict[str, Any], tmp_path: Path) -> None:
    zero = {"stage": stage, "reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 0, **more.get("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "run_dir": str(tmp_path),
        **{key: value for key, value in more.items() if key != "zero"},
        "zero_optimization": zero,
    }

    def train(communicator: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        engine, *_ = polyaccel.initialize(model=model, config=config)
        dtype = torch.bfloat16 if "bf16" in more else torch.float32
        for _ in range(STEPS * engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(2, 40, dtype=dtype)).float().square().mean())
            engine.step()
        engine.destroy()

    run_threads(2, train)
    told = rows(tmp_path)
    assert [row["step"] for row in told] == [1, 2, 3, 4]
    planned = told[0]["planned_nbytes"]
    assert all(not row["planned_nbytes"] for row in told[1:]), "once, as long as it does not change"
    for row in told[1:]:
        held = row["memory_nbytes"]
        assert held["in use"] > 0
        for name in {key for key in (*held, *planned) if key.split(" (")[0] in EXACT}:
            assert held.get(name, 0) == planned.get(name, 0), name
        for name in {key for key in held if key.split(" (")[0] in BOUNDED}:
            assert held[name] <= planned[name], name
        assert set(held) - {"in use"} <= set(planned)
