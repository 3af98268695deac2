"""A traced training: one file with all ranks, their phases, units, and every collective of the recorder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import perf_counter, time

import pytest
import torch
from traced_training import FIRST, LAST, ThreeLayers, traced_config

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.observability.traces.chrome import read_trace
from polyaccel.observability.traces.report import report_of
from polyaccel.pipeline.program import TaskTime, spans_of
from polyaccel.pipeline.table import PipelineOp, PipelineTask
from polyaccel.testkit.ranks.threads import run_threads

RANKS = 2


def test_every_call_phase_and_unit_of_the_steps_is_in_the_file(tmp_path: Path) -> None:
    def train(inner):
        communicator = RecordingCommunicator(inner, watch_s=None)
        set_thread_communicator(communicator)
        torch.manual_seed(0)
        engine, *_ = polyaccel.initialize(model=ThreeLayers(), config=traced_config(tmp_path, 3))
        ends = []
        for _ in range(LAST + 2):
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()
            ends.append(max(entry.seq for entry in communicator.recorder.entries))
        assert communicator.recorder.kept is None
        engine.destroy()
        return ends

    told = run_threads(RANKS, train)
    trace = read_trace(tmp_path / "trace.json")
    assert set(trace) == set(range(RANKS))
    for rank, spans in trace.items():
        assert [span.name for span in spans if span.kind == "step"] == [f"step {FIRST}", f"step {LAST}"]
        phases = Counter(span.name for span in spans if span.kind == "phase")
        assert phases["forward"] == phases["backward"] == phases["update"] == 2
        units = Counter(span.name for span in spans if span.kind == "unit")
        assert units == {f"{way} layers.{at}": 2 for way in ("forward", "backward") for at in range(3)}
        calls = [span for span in spans if span.kind == "collective"]
        numbers = sorted(span.more["number"] for span in calls)
        assert numbers == list(range(told[rank][0] + 1, told[rank][2] - 1)), "all but the two that gather the trace"
        gathered = {span.more["bucket"] for span in calls if span.more["operation"] == "all_gather"}
        assert gathered >= {0, 1, 2}
        begin, end = (next(s for s in spans if s.name == name) for name in (f"step {FIRST}", f"step {LAST}"))
        assert all(begin.begin_s - 1e-3 <= span.begin_s <= end.end_s + 1e-3 for span in spans)
    assert "critical path" in report_of(trace)


def test_operations_of_a_pipeline_are_told_in_wall_time() -> None:
    began_s, now_s = perf_counter(), time()
    ((name, begin_s, end_s),) = spans_of([TaskTime(PipelineTask(PipelineOp.BACKWARD, 2, 1), began_s, began_s + 1)])
    assert name == "backward of micro-batch 2, chunk 1"
    assert begin_s == pytest.approx(now_s, abs=1)
    assert end_s - begin_s == pytest.approx(1)
