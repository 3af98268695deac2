"""All that can be watched at once: it is there, and training goes on bit for bit as without it, in torch and JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.observability.traces.chrome import read_trace
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 4
PHASES = {"data", "forward", "backward", "reduce", "update", "publish", "other"}


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def watched(folder: Path) -> dict[str, Any]:
    """Sections that switch on all there is."""
    return {
        "run_dir": str(folder),
        "csv_monitor": {"enabled": True},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "steps_per_print": 2,
        "timers": {"throughput": {"enabled": True}},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(folder / "table.txt")},
        "trace": {"steps": [2, 3]},
        "alerts": {"enabled": True, "every": 2, "replicas": 1, "straggler": 0, "data": 0, "memory_growth": 0},
        "comms_logger": {"enabled": True},
    }


def train_torch(settings: dict[str, Any]) -> list[bytes]:
    import torch
    from parity_models import drawn_from
    from torch import nn

    with drawn_from(0):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    engine, *_ = polyaccel.initialize(model=model, config=settings)
    rank = engine.communicator.rank
    found = []
    for at in range(2 * STEPS):
        loss = engine(torch.linspace(-1, 1 + rank, 16).reshape(2, 8) * (1 + at)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.detach().numpy().tobytes())
    weights = engine.module_state_dict()
    found += [weights[name].numpy().tobytes() for name in sorted(weights)]
    engine.destroy()
    return found


def train_jax(settings: dict[str, Any]) -> list[bytes]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    def loss_of(params: Any, batch: Any, rng: Any) -> Any:
        return (jax.nn.relu(batch @ params["first"]) @ params["second"]).mean() ** 2

    params = {"first": jnp.linspace(-1, 1, 128).reshape(8, 16), "second": jnp.linspace(1, -2, 64).reshape(16, 4)}
    engine = polyaccel.initialize(model=loss_of, params=params, config=settings)
    rank = engine.communicator.rank
    found = []
    for step in range(STEPS):
        loss = engine.train_batch(jnp.linspace(-1, 1 + rank, 32).reshape(4, 8) * (1 + step))
        found.append(np.asarray(loss).tobytes())
    found += [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(engine.params)]
    engine.destroy()
    return found


@pytest.mark.parametrize(("framework", "stage"), [("torch", 3), ("jax", 2)])
def test_all_is_there_and_no_bit_is_another(framework: str, stage: int, tmp_path: Path) -> None:
    train_one = {"torch": train_torch, "jax": train_jax}[framework]

    def train(inner: Any, settings: dict[str, Any]) -> list[bytes]:
        set_thread_communicator(RecordingCommunicator(inner, watch_s=None))
        return train_one(settings)

    plain = config(stage)
    without = run_threads(2, train, plain)
    assert run_threads(2, train, plain | watched(tmp_path)) == without
    steps = [line for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert set(step["phase_s"]) <= PHASES | {"outside"}
        assert sum(step["phase_s"].values()) == pytest.approx(step["step_time_s"])
        assert step["tflops"] > 0
        assert step["model_flops_utilisation"] > 0
        assert step["collectives"]
        held, planned = step["memory_nbytes"], steps[0]["planned_nbytes"]
        assert held["in use"] > 0
        if step["step"] > 1:
            assert held["optimizer states"] == planned["optimizer states"] > 0
    trace = read_trace(tmp_path / "trace.json")
    assert sorted(trace) == [0, 1]
    for spans in trace.values():
        kinds = [span.kind for span in spans]
        assert kinds.count("step") == 2
        assert {"phase", "collective"} <= set(kinds)
    assert "FLOPs" in (tmp_path / "table.txt").read_text()
    assert "</html>" in (tmp_path / "report.html").read_text()
    assert list(tmp_path.rglob("*.csv"))
