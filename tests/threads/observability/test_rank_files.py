"""The files that every rank writes to the run's folder: its steps with what it waited for, and its log."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.observability.run_log import RUN_FILE, RunLog
from polyaccel.observability.setup import start_monitoring
from polyaccel.testkit.ranks.threads import run_threads

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_rank_writes_its_own_steps(tmp_path: Path) -> None:
    def train(inner: Any) -> int:
        communicator = RecordingCommunicator(inner, watch_s=None)
        set_thread_communicator(communicator)
        torch.manual_seed(0)
        engine, *_ = polyaccel.initialize(model=torch.nn.Linear(4, 1), config={**CONFIG, "run_dir": str(tmp_path)})
        calls = []
        for _ in range(3):
            before = sum(communicator.recorder.calls.values())
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
            calls.append(sum(communicator.recorder.calls.values()) - before)
            if communicator.rank == 0:
                engine.monitor.write_events([("own", 1.0, engine.global_steps)])
        communicator.recorder.reset_traffic()
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        calls.append(sum(communicator.recorder.calls.values()))
        assert engine.monitor.enabled == (communicator.rank == 0)
        engine.destroy()
        return calls

    told = run_threads(2, train)
    first = [record for record in lines(tmp_path / "metrics.jsonl") if "tag" not in record]
    second = lines(tmp_path / "ranks" / "1.jsonl")
    assert [record["step"] for record in first] == [record["step"] for record in second] == [1, 2, 3, 4]
    for calls, records in zip(told, (first, second), strict=True):
        for count, record in zip(calls, records, strict=True):
            assert sum(one["calls"] for one in record["collectives"].values()) == count
            assert all(one["waited_s"] >= 0 for one in record["collectives"].values())
    assert all(record["collectives"]["all_reduce"]["sent_nbytes"] >= 5 * 4 for record in first)


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ranks").write_text("in the way")

    def write(communicator: Any) -> None:
        stream = start_monitoring(communicator, str(tmp_path), [], {})
        stream.add_picture("none/at all.svg", lambda: "<svg/>")
        stream.close()

    run_threads(2, write)
    assert (tmp_path / RUN_FILE).exists()
    assert "rank 1 writes no files to the run's folder" in caplog.text
    assert "the picture none/at all.svg could not be written" in caplog.text


def test_a_log_goes_on_and_says_how_the_run_ended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"time": 1, "level": "info", "text": "before"}\n{"time": 2, "lev')
    log = logging.getLogger("polyaccel.tests")
    other = RunLog(tmp_path / "ranks" / "1.log.jsonl", 1)
    own = RunLog(path, 0)
    log.warning("a warning of %d", 1)
    own.finish()
    own.finish()
    try:
        raise RuntimeError("rank 0 is gone")
    except RuntimeError:
        other.finish()
    log.error("nobody writes this down")
    assert [line.get("state") for line in lines(path)] == [None, "running", None, "ended"]
    assert lines(tmp_path / "ranks" / "1.log.jsonl")[-1]["state"] == "failed"
    assert [(line["level"], line["text"]) for line in lines(path)] == [
        ("info", "before"),
        ("info", "the run has begun"),
        ("warning", "a warning of 1"),
        ("info", "the run has ended"),
    ]
    assert [(line["level"], line["text"]) for line in lines(tmp_path / "ranks" / "1.log.jsonl")] == [
        ("info", "the run has begun"),
        ("warning", "a warning of 1"),
        ("error", "rank 1 ended by an error: RuntimeError: rank 0 is gone"),
    ]


def test_the_console_goes_on_beside_a_log(tmp_path: Path) -> None:
    script = """
import logging, sys
from pathlib import Path
from polyaccel.observability.console import show_log
from polyaccel.observability.run_log import RunLog
RunLog(Path(sys.argv[1]), 0)
show_log(0, None)
logging.getLogger("polyaccel.any").info("shown in both")
"""
    path = tmp_path / "log.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == "[polyaccel] shown in both\n"
    assert [line["text"] for line in lines(path)] == ["the run has begun", "shown in both"]
