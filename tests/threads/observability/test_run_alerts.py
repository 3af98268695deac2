"""Alarms of real trainings, torch and JAX: in the log and in the stream; nothing at all where they are off."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import drawn_from
from torch import nn

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.observability.alerts.settings import RankFigures
from polyaccel.observability.alerts.watching import RunAlarms
from polyaccel.testkit.ranks.threads import run_threads

EVERY = 2


def alarms_in(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "alarm" in line]


def config(folder: Path, stage: int = 0, **alarms: Any) -> dict[str, Any]:
    off = {"straggler": 0, "data": 0, "memory_growth": 0}  # what depends on the machine that tests run on
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "run_dir": str(folder),
        "alerts": {"enabled": True, "every": EVERY, "replicas": 4, **off, **alarms},
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def net() -> Net:
    """The same one every time."""
    with drawn_from(0):
        return Net()


def record(inner: Any) -> RecordingCommunicator:
    communicator = RecordingCommunicator(inner, watch_s=None)
    set_thread_communicator(communicator)
    return communicator


def flip(engine: Any, fqn: str) -> None:
    """Change one bit of this rank's copy of a parameter, as a broken memory does."""
    place, slot = engine.zero.params.locate(fqn)
    copy = engine.zero.params.full(place.bucket.index).view(slot.offset, slot.param.numel)
    bits = bytearray(copy.to_bytes())
    bits[0] ^= 1
    copy.from_bytes(bits)


@pytest.mark.parametrize(
    ("stage", "fqn"), [(0, "first.weight"), (0, "second.bias"), (2, "second.weight"), (3, "second.bias")]
)
def test_a_copy_of_weights_that_is_corrupted_is_named(tmp_path: Path, stage: int, fqn: str) -> None:
    """At stage 0 a wrong copy stays wrong. Above, an update mends it: what the passes before have computed with is
    compared. At stage 3 persistent parameters have copies."""

    def train(inner: Any) -> None:
        record(inner)
        settings = config(tmp_path, stage, replicas=1) if stage else config(tmp_path)
        engine, *_ = polyaccel.initialize(model=net(), config=settings)
        for step in range(1, 13):
            engine.backward(engine(torch.ones(2, 6)))
            if step == 3 and inner.rank == 1:
                flip(engine, fqn)
            engine.step()
        engine.destroy()

    run_threads(3, train)
    said = alarms_in(tmp_path)
    (alarm,) = [one for one in said if repr(fqn) in one["alarm"]][:1]
    assert (alarm["tag"], alarm["ranks"]) == ("alarms/replicas", [1])
    assert 3 <= alarm["step"] <= 3 + 4
    assert " than the 2 others: stop, continue from a checkpoint before that" in alarm["alarm"]


def test_a_wild_batch_is_told_in_the_log_and_in_the_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[RankFigures] = []
    look = RunAlarms._look

    def looking(self: RunAlarms, figures: list[RankFigures]) -> None:
        told.extend(figures)
        look(self, figures)

    def train(inner: Any) -> None:
        record(inner)
        engine, *_ = polyaccel.initialize(model=net(), config=config(tmp_path, 2, window=10))
        for step in range(1, 31):
            x = torch.ones(2, 6) if step != 21 or inner.rank == 0 else torch.full((2, 6), 1000.0)
            engine.backward(engine(x))
            engine.step()
        engine.destroy()

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "polyaccel"):
        patch.setattr(RunAlarms, "_look", looking)
        run_threads(2, train)
    said = alarms_in(tmp_path)
    assert [(one["tag"], one["step"]) for one in said] == [("alarms/loss", 21), ("alarms/grad_norm", 21)]
    assert "most on rank 1" in said[0]["alarm"]
    assert [one.message for one in caplog.records if one.name.endswith("alerts.watching")] == [
        one["alarm"] for one in said
    ]
    assert {one.rank for one in told} == {0, 1}
    for one in told:
        assert one.steps == EVERY
        assert one.own_s is not None
        assert {"forward", "backward", "data"} <= one.own_s.keys()
        assert 0 < sum(one.own_s.values()) <= one.seconds
        assert one.memory_nbytes


def test_waiting_for_other_ranks_is_no_work_of_ones_own(tmp_path: Path) -> None:
    """Rank 1 comes to a meeting when rank 0 has been waiting there: rank 0's figures say that it waited."""

    def train(inner: Any) -> dict[str, float]:
        communicator = record(inner)
        engine, *_ = polyaccel.initialize(model=net(), config=config(tmp_path))
        engine.timer.take()
        engine.timer.take_waited()
        before_s = sum(communicator.recorder.waited_s.values())
        with engine.timer("backward"):
            communicator.barrier()
        engine.timer.take()
        waited_s = engine.timer.take_waited()
        assert waited_s.pop("backward") == pytest.approx(sum(communicator.recorder.waited_s.values()) - before_s)
        assert set(waited_s.values()) <= {0.0}
        engine.destroy()

    run_threads(2, train)


def test_a_copy_of_weights_of_jax_is_named(tmp_path: Path) -> None:
    import jax.numpy as jnp

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return ((batch @ params["first"]) @ params["second"]).mean()

    def train(inner: Any) -> None:
        record(inner)
        params = {"first": jnp.ones((6, 4)), "second": jnp.ones((4, 2))}
        engine = polyaccel.initialize(model=loss, params=params, config=config(tmp_path))
        for step in range(1, 9):
            engine.grad_step(jnp.ones((2, 6)))
            if step == 3 and inner.rank == 2:
                flip(engine, "second")
            engine.step()
        engine.destroy()

    run_threads(3, train)
    first = alarms_in(tmp_path)[0]
    assert (first["tag"], first["ranks"]) == ("alarms/replicas", [2])


def test_alarms_that_are_off_cost_nothing(tmp_path: Path) -> None:
    def train(inner: Any, *, enabled: bool) -> list[str]:
        communicator = record(inner)
        settings = config(tmp_path) | {"alerts": {"enabled": enabled, "every": 1, "replicas": 1}}
        engine, *_ = polyaccel.initialize(model=net(), config=settings)
        assert (engine.timer.waited is not None) is enabled
        begin = len(communicator.recorder.entries)
        engine.backward(engine(torch.ones(2, 6)))
        engine.step()
        calls = [str(entry.collective.operation) for entry in list(communicator.recorder.entries)[begin:]]
        engine.destroy()
        return calls

    without = run_threads(2, lambda inner: train(inner, enabled=False))[0]
    beside = run_threads(2, lambda inner: train(inner, enabled=True))[0]
    assert sorted(beside) == sorted([*without, beside[-1]]), "one small exchange more"
    assert len(beside) == len(without) + 1


def test_a_copy_of_weights_of_a_stage_is_compared_with_those_of_its_stage(tmp_path: Path) -> None:
    """Two stages of three ranks: rank 5 differs from ranks 3 and 4, and the other stage has other parameters."""
    from polyaccel.torch.pipeline import PipelineModule

    settings = config(tmp_path) | {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}

    def batches() -> Iterator[Any]:
        while True:
            yield torch.ones(2, 6), torch.zeros(2, 3)

    def train(inner: Any) -> str:
        record(inner)
        with drawn_from(0):
            layers = [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)]
        module = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
        engine, *_ = polyaccel.initialize(model=module, config=settings)
        own = next(iter(engine.zero.params.steps))
        for step in range(1, 9):
            if step == 3 and inner.rank == 5:
                flip(engine, own)
            engine.train_batch(batches())
        engine.destroy()
        return own

    *_, own = run_threads(6, train)
    said = alarms_in(tmp_path)[0]
    assert said["ranks"] == [5]
    assert f"with other weights of {own!r} than the 2 others" in said["alarm"]
