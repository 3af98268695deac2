"""Perfetto's own parser reads the traces of real runs: it finds nothing wrong with them, and every collective of the
recorder is a slice of its rank there.

`make test-traces` runs these. They need Perfetto's program `trace_processor_shell`, which TRACE_PROCESSOR names;
elsewhere they are skipped, and `tests/unit/observability/test_trace_analysis.py` holds the form of the file.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pipeline_models import batches, pipeline_config, plain_layers, plain_model

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import set_default_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.testkit.ranks.procs import RankPool

PROGRAM = os.environ.get("TRACE_PROCESSOR", "")
pytestmark = pytest.mark.skipif(
    not PROGRAM,
    reason="TRACE_PROCESSOR names no program; https://get.perfetto.dev/trace_processor is one: make test-traces",
)
RANKS, FIRST, LAST = 2, 2, 4
AWAY = {"device": "cpu"}
KINDS: dict[str, dict[str, Any]] = {
    "sharded": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": AWAY}},
    "bucketed": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 64}, "gradient_accumulation_steps": 2},
    "profiled": {"zero_optimization": {"stage": 2}},
    "pipelined": pipeline_config(1),
}
Call = tuple[str, int, tuple[int, ...], int | None, str]
"""An operation, its number on a group, the group, its bucket and its label."""


class Slice(NamedTuple):
    """A slice of a rank, its times in nanoseconds; its track, and the name and begin of the slice in which it lies."""

    rank: int
    kind: str
    name: str
    begin: int
    length: int
    track: str | None = None
    outer: tuple[str, int] | None = None


WRONG = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = """
with held as (
  select slice.*, thread.name as track, coalesce(thread.upid, process_track.upid) as upid
  from slice
  left join thread_track on thread_track.id = slice.track_id left join thread using (utid)
  left join process_track on process_track.id = slice.track_id
)
select held.id, held.parent_id, held.category, held.name, held.ts, held.dur, held.track,
  process.pid as rank, process.name as process,
  extract_arg(held.arg_set_id, 'args.operation') as operation,
  extract_arg(held.arg_set_id, 'args.number') as number,
  extract_arg(held.arg_set_id, 'args.bucket') as bucket,
  extract_arg(held.arg_set_id, 'args.label') as label,
  (select group_concat(int_value, ' ') from args
   where args.arg_set_id = held.arg_set_id and flat_key = 'args.group') as members
from held left join process using (upid)
order by held.ts, held.id
"""


def train(inner: Communicator, kind: str, folder: str) -> list[tuple[Call, float]]:
    """The calls that the recorder had of the traced steps on this rank, in order, and their seconds."""
    traced = {"run_dir": folder, "trace": {"steps": [FIRST, LAST], "profiler": kind == "profiled"}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, **KINDS[kind], **traced}
    communicator = RecordingCommunicator(inner, watch_s=None)
    set_default_communicator(communicator)
    try:
        model = plain_model(RANKS) if kind == "pipelined" else torch.nn.Sequential(*plain_layers())
        engine: Any
        engine, *_ = polyaccel.initialize(model=model, config=config)
        kept = None
        for step in range(LAST):
            kept = communicator.recorder.kept or kept
            if kind == "pipelined":
                engine.train_batch(batches(step, 0))
                continue
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.ones(4, 6)).square().mean())
                engine.step()
        engine.destroy()
    finally:
        set_default_communicator(inner)
    assert kept is not None
    assert communicator.recorder.kept is None
    calls: list[tuple[Call, float]] = []
    for entry in kept:
        assert entry.ended_s is not None
        told = entry.collective
        call = told.operation.value, entry.seq, entry.group, told.bucket, told.label
        calls.append((call, entry.ended_s - entry.started_s))
    return calls


def answers(trace: Path, sql: str) -> list[dict[str, str]]:
    """The rows that Perfetto finds in a trace. What is null there is '[NULL]'."""
    query = trace.with_suffix(".sql")
    query.write_text(sql, encoding="utf-8")
    done = subprocess.run([PROGRAM, "-q", query, trace], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(line for line in done.stdout.splitlines() if line))


def slice_of(row: dict[str, str], outer: dict[str, str] | None) -> Slice:
    track = None if row["track"] == "[NULL]" else row["track"]
    at = (outer["name"], int(outer["ts"])) if outer else None
    return Slice(int(row["rank"]), row["category"], row["name"], int(row["ts"]), int(row["dur"]), track, at)


def call_of(row: dict[str, str]) -> Call:
    bucket = None if row["bucket"] == "[NULL]" else int(row["bucket"])
    group = tuple(sorted(map(int, row["members"].split())))
    return row["operation"], int(row["number"]), group, bucket, row["label"]


def written(trace: Path) -> Counter[Slice]:
    """The slices of our own file. Asynchronous ones have no track, and lie in none."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    ends = {(one["pid"], one["id2"]["local"]): one["ts"] for one in events if one["ph"] == "e"}
    around: dict[tuple[int, int], list[Slice]] = {}
    found: Counter[Slice] = Counter()
    for one in events:
        if one["ph"] not in "Xb":
            continue
        begin, length = round(1000 * one["ts"]), round(1000 * one.get("dur", 0))
        if one["ph"] == "b":
            length = round(1000 * ends[one["pid"], one["id2"]["local"]]) - begin
            found[Slice(one["pid"], one["cat"], one["name"], begin, length)] += 1
            continue
        where = one["pid"], one["tid"]
        open_ = around.setdefault(where, [])
        while open_ and open_[-1].begin + open_[-1].length <= begin:
            open_.pop()
        outer = (open_[-1].name, open_[-1].begin) if open_ else None
        open_.append(Slice(one["pid"], one["cat"], one["name"], begin, length, tracks[where], outer))
        found[open_[-1]] += 1
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_perfetto_has_all_of_a_run(kind: str, rank_pool: Callable[..., RankPool], tmp_path: Path) -> None:
    recorded = rank_pool(RANKS).run(train, kind, str(tmp_path))
    trace = tmp_path / "trace.json"
    assert answers(trace, WRONG) == []
    slices = answers(trace, SLICES)
    for rank, calls in enumerate(recorded):
        assert calls
        found = [row for row in slices if row["category"] == "collective" and row["rank"] == str(rank)]
        assert {row["process"] for row in found} == {f"rank {rank}"}
        assert [call_of(row) for row in found] == [call for call, _ in calls]
        assert [int(row["dur"]) / 1e9 for row in found] == pytest.approx([took_s for _, took_s in calls], abs=1e-6)
    by_id = {row["id"]: row for row in slices}
    assert Counter(slice_of(row, by_id.get(row["parent_id"])) for row in slices) == written(trace)
