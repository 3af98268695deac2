"""What the ranks of a stage send each other of their gradients, by the recorder, beside what the plan says."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from block_models import gates
from block_models import pairs as gate_pairs
from deep_pipelines import deep_model, numbered_words
from pipeline_models import MICRO_BATCHES, pipeline_config

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.plan.traffic import step_traffic


@pytest.mark.parametrize(
    ("schedule", "tied", "stage"),
    [("zb-v", False, 2), ("dualpipe-v", True, 2), ("zb-h1", False, 1), ("interleaved", False, 3)],
)
def test_a_chunk_s_gradients_are_reduced_once_a_micro_batch(schedule: str, tied: bool, stage: int) -> None:
    """Two chunks a stage: a backward pass of one leaves the buckets of the other alone."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = pipeline_config(stage, schedule, zero_optimization=zero)

    def run(communicator: Any) -> tuple[float, float]:
        recording = RecordingCommunicator(communicator, watch_s=None)
        set_thread_communicator(recording)
        engine, *_ = polyaccel.initialize(model=deep_model(2, schedule=schedule, tied=tied), config=config)
        for step in range(2):
            recording.recorder.reset_traffic()
            data = engine.communicator.rank % 2
            engine.train_batch(iter([numbered_words(step, micro, data) for micro in range(MICRO_BATCHES)]))
        sent = recording.recorder.sent_numel["reduce_scatter"]
        planned = step_traffic(engine.zero.plan).reduce_scatter_numel
        largest = max(bucket.numel // 2 for bucket in engine.zero.layout.buckets)
        engine.destroy()
        # The owner of tied weights gets the gradients of others with a pass of another chunk.
        return sent - planned, largest if tied and stage > 1 else 0

    for excess, allowed in run_threads(4, run):
        assert 0 <= excess <= allowed


def test_a_model_that_is_cut_says_which_chunks_use_a_parameter() -> None:
    """A weight that all blocks use is reduced with each chunk, the blocks once a micro-batch."""
    config = pipeline_config(2, "zb-v", zero_optimization={"stage": 2}, pipeline={"stages": 2, "schedule": "zb-v"})

    def run(communicator: Any) -> list[str]:
        engine, *_ = polyaccel.initialize(model=deepcopy(gates()), config=config)
        engine.train_batch(iter([gate_pairs(0, micro) for micro in range(MICRO_BATCHES)]))
        found = [" ".join(slot.param.fqn for slot in bucket.slots) for bucket in engine.zero.layout.buckets]
        engine.destroy()
        return found

    first, second = run_threads(2, run)
    assert first == [
        "gates.3.layer.bias gates.3.layer.weight norm.bias norm.weight",
        "gates.0.layer.bias gates.0.layer.weight",
        "scale",
    ]
    assert second == ["gates.2.layer.bias gates.2.layer.weight", "gates.1.layer.bias gates.1.layer.weight"]
