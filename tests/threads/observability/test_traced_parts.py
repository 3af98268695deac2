"""Traces beside phases and units: tiers, recomputation, groups of a mesh, the frameworks' own profilers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from traced_training import LAST, ThreeLayers, traced_config

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import FlightRecorder, RecordingCommunicator
from polyaccel.observability.traces.chrome import read_trace
from polyaccel.observability.traces.report import report_of
from polyaccel.testkit.ranks.threads import run_threads


def train(inner: Any, settings: dict[str, Any], steps: int = LAST + 1) -> None:
    set_thread_communicator(RecordingCommunicator(inner, watch_s=None))
    torch.manual_seed(0)
    engine, *_ = polyaccel.initialize(model=ThreeLayers(), config=settings)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_transfers_of_tiers_are_told(device: str, tmp_path: Path) -> None:
    """States in host memory or in files, and at stage 3 parameters too: what was read, how much, how long it was waited
    for. Losses and weights are held by other tests; a traced tier is that tier."""
    away = {"device": device} | ({"nvme_path": str(tmp_path)} if device == "nvme" else {})
    settings = traced_config(tmp_path, 3, zero={"offload_optimizer": away, "offload_param": away})
    run_threads(2, train, settings)
    trace = read_trace(tmp_path / "trace.json")
    for spans in trace.values():
        told = [span for span in spans if span.kind == "tier"]
        reads = [span for span in told if ": read group " in span.name]
        assert len(reads) % 2 == 0, "as many in each step"
        assert reads
        assert all(span.more["nbytes"] > 0 for span in reads)
        assert all(0 <= span.more["waited_s"] <= span.seconds + 1e-6 for span in told)
    assert "offload tiers" in report_of(trace)


def test_what_is_computed_again_in_backward_is_told(tmp_path: Path) -> None:
    settings = traced_config(tmp_path, activation_checkpointing={"enabled": True, "blocks": ["layers.*"]})
    run_threads(2, train, settings)
    trace = read_trace(tmp_path / "trace.json")
    for spans in trace.values():
        again = Counter(span.name for span in spans if span.name.startswith("again "))
        assert again == {f"again layers.{at}": 2 for at in range(3)}
        backwards = [span for span in spans if span.kind == "phase" and span.name == "backward"]
        for span in spans:
            if span.name.startswith("again "):
                assert any(one.begin_s <= span.begin_s and span.end_s <= one.end_s for one in backwards)
    assert "is not computed again in backward" in report_of(trace)


def test_every_call_of_the_recorder_is_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of tensor ranks by two of data: calls over all groups, by group, number and operation."""
    kept: dict[int, list[Any]] = {}
    start = FlightRecorder.start

    def keeping(self: FlightRecorder, group: tuple[int, ...], collective: Any, sent_numel: float) -> Any:
        entry = start(self, group, collective, sent_numel)
        if self.kept is not None:
            kept.setdefault(id(self), []).append((group, entry.seq, collective.operation.value))
        return entry

    monkeypatch.setattr(FlightRecorder, "start", keeping)
    cuts = (("layers.0", "column"), ("layers.1", "row"))
    rules = {"layer_specs": [{"patterns": [name], "partition_type": kind} for name, kind in cuts]}
    settings = traced_config(tmp_path, 3, tensor_parallel={"autotp_size": 2, "partition_config": rules})
    run_threads(4, train, settings)
    trace = read_trace(tmp_path / "trace.json")
    told = sorted(
        sorted((tuple(span.more["group"]), span.more["number"], span.more["operation"]) for span in spans
               if span.kind == "collective")
        for spans in trace.values()
    )  # fmt: skip
    assert told == sorted(sorted(own) for own in kept.values())
    assert len({call[0] for own in told for call in own}) > 1, "groups along several axes"


def test_torchs_own_profiler_is_merged_on_the_same_clock(tmp_path: Path) -> None:
    run_threads(1, train, traced_config(tmp_path, profiler=True))
    whole = json.loads((tmp_path / "trace.json").read_text())
    profiled = [event for event in whole["traceEvents"] if event.get("cat") == "profiler"]
    products = [event for event in profiled if event["name"] == "aten::addmm"]
    assert len(products) == 2 * 3
    steps = [event for event in whole["traceEvents"] if event.get("cat") == "step"]
    forwards = [event for event in whole["traceEvents"] if event.get("cat") == "phase" and event["name"] == "forward"]
    assert len(steps) == 2
    for product in products:
        inside = [one for one in forwards if one["ts"] - 100 <= product["ts"] <= one["ts"] + one["dur"] + 100]
        assert len(inside) == 1
    tracks = {event["args"]["name"] for event in whole["traceEvents"] if event["name"] == "thread_name"}
    assert any(name.startswith("torch: ") for name in tracks)
    read = read_trace(tmp_path / "trace.json")
    assert all(span.kind != "profiler" for span in read[0])


def test_jaxs_own_profiler_is_merged(tmp_path: Path) -> None:
    import jax.numpy as jnp

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return ((batch @ params["first"]) @ params["second"]).mean()

    def train_jax(inner: Any) -> None:
        params = {"first": jnp.ones((6, 4)), "second": jnp.ones((4, 2))}
        engine = polyaccel.initialize(model=loss, params=params, config=traced_config(tmp_path, profiler=True))
        for _ in range(LAST + 1):
            engine.train_batch(jnp.ones((2, 6)))
        engine.destroy()

    run_threads(1, train_jax)
    whole = json.loads((tmp_path / "trace.json").read_text())
    profiled = [event for event in whole["traceEvents"] if event.get("cat") == "profiler"]
    (begin, end) = (event for event in whole["traceEvents"] if event.get("cat") == "step")
    calls = [event for event in profiled if event["name"].startswith("PjitFunction")]
    assert calls
    assert all(begin["ts"] - 1000 <= event["ts"] <= end["ts"] + end["dur"] + 1000 for event in calls)


def test_another_profiler_at_work_costs_a_warning_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from polyaccel.torch.profiling.kineto import KinetoProfiler

    def busy(self: KinetoProfiler) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(KinetoProfiler, "start", busy)
    run_threads(1, train, traced_config(tmp_path, profiler=True))
    assert "nothing of the profiler of torch: Profiler is already enabled" in caplog.text
    assert len([span for span in read_trace(tmp_path / "trace.json")[0] if span.kind == "step"]) == 2
