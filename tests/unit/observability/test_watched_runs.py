"""What is read of a run's folder while it grows: half lines, files that begin anew, thinned figures, who waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_runs import SampleRun, write_sample

from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.document import open_runs
from polyaccel.observability.dashboard.figures import FigureTable, flattened
from polyaccel.observability.dashboard.run import FileTailer, WatchedRun
from polyaccel.observability.dashboard.waits import WaitTable, waits_of
from polyaccel.observability.traces.chrome import Span


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60)), st.lists(st.text(max_size=20), max_size=12))
def test_lines_are_told_once_however_they_arrive(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    followed = FileTailer(path)
    assert followed.news() == (False, [])
    data = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
    told = []
    with path.open("wb", buffering=0) as file:
        at = 0
        for length in [*cuts, len(data)]:
            file.write(data[at : at + length])
            at += length
            starts_over, lines = followed.news()
            assert not starts_over
            told += lines
    assert told == [{"text": text} for text in texts]
    assert followed.news() == (False, [])


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'[1]\n\n{"a": 1\n\xff\xfe\n{"b": 2}\n{"c"')
    followed = FileTailer(path)
    assert followed.news() == (False, [{"b": 2}])
    assert followed.unread == 3


ANEW = {"shorter": '{"other": 1}\n', "longer": '{"longer": "than it was before"}\n{"b": 2}\n'}


@pytest.mark.parametrize("anew", ANEW.values(), ids=ANEW)
def test_a_file_that_begins_anew_is_read_anew(tmp_path: Path, anew: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"first": 1}\n')
    followed = FileTailer(path)
    followed.news()
    path.write_text(anew)
    assert followed.news() == (True, [json.loads(line) for line in anew.splitlines()])
    path.unlink()
    assert followed.news() == (True, [])
    assert followed.news() == (False, [])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(2, 20))
def test_thinned_figures_keep_the_extremes(values: list[float], most: int) -> None:
    table = FigureTable(most)
    for step, value in enumerate(values, 1):
        table.add(step, {"x": value})
    shown = table.shown()
    assert len(shown["step"]) <= most
    assert shown["step"] == sorted(shown["step"])
    low, high = shown.get("low", shown["figures"])["x"], shown.get("high", shown["figures"])["x"]
    assert min(low) == pytest.approx(min(values), rel=1e-5)
    assert max(high) == pytest.approx(max(values), rel=1e-5)


def test_steps_that_come_again_replace_what_there_was() -> None:
    table = FigureTable(100)
    for step in range(1, 11):
        table.add(step, {"x": 1.0})
    table.add(6, {"x": 2.0, "y": float("nan")})
    assert table.shown() == {"step": [1, 2, 3, 4, 5, 6], "figures": {"x": [1, 1, 1, 1, 1, 2]}}
    thinned = FigureTable(4)
    for step in [*range(1, 33), 9]:
        thinned.add(step, {"x": float(step)})
    assert thinned.shown()["step"][-1] < 16


@pytest.mark.parametrize("most", [2, 100])
def test_figures_that_a_script_writes_one_by_one_stand_in_one_step(most: int) -> None:
    table = FigureTable(most)
    for step in range(1, 9):
        for name in ("reward", "rollout_s", "update_s"):
            table.add(step, {name: float(step)})
    shown = table.shown()
    assert list(shown["figures"]) == ["reward", "rollout_s", "update_s"]
    assert len({tuple(column) for column in shown["figures"].values()}) == 1
    table.add(5, {"reward": 0.0})
    assert table.shown()["step"][-1] <= 5
    if most == 100:
        assert table.shown()["figures"] == {
            "reward": [1, 2, 3, 4, 0],
            **{name: [1, 2, 3, 4, None] for name in ("rollout_s", "update_s")},
        }


def test_numbers_have_their_places_as_names() -> None:
    record = {"step": 1, "skipped": True, "lr": [0.1, 0.2], "loss": None, "phase_s": {"forward": 0.5}, "tokens": [1, 2]}
    assert flattened(record) == {"lr": 0.1, "lr_1": 0.2, "phase_s/forward": 0.5}


def test_the_others_wait_for_the_rank_that_waits_least() -> None:
    table = WaitTable(3)
    for step in (1, 2):
        for rank, waited_s in ((2, 0.5), (0, 0.25), (1, 1.0)):
            table.add(step, rank, waited_s)
    table.add(3, 0, 9.0)  # a step that the others have not told yet
    assert table.shown() == {"steps": 2, "pairs": [[1, 0, 1.5], [2, 0, 0.5]]}


def test_what_a_trace_shows() -> None:
    call = {"group": [0, 1], "number": 0, "bucket": 0, "label": "", "numel": 1, "dtype": "float32"}
    moved = {"tier": "nvme", "nbytes": 100, "waited_s": 0.25}
    trace = {
        rank: [
            Span("step", "step 1", 0.0, 4.0, {"step": 1}),
            Span("phase", "forward", 0.0, 3.0),
            Span("phase", "publish", 1.0, 2.0),
            Span("collective", "all_gather", came_s, 3.5, {**call, "waited_s": 3.5 - came_s}),
            Span("tier", "nvme: fetch", 2.0, 2.5, moved),
        ]
        for rank, came_s in ((0, 1.5), (1, 3.25))
    }
    told = waits_of(trace)
    assert told is not None
    assert (told["steps"], told["seconds"], told["pairs"]) == (1, 4, [[0, 1, 2]])
    assert told["tiers"] == [[0, "nvme", 100, 0.25], [1, "nvme", 100, 0.25]]
    spans = [["forward", 0, 3], ["publish", 1, 1], ["waiting", 1.5, 2], ["waiting", 2.25, 0.25]]
    assert told["rows"][0] == {"rank": 0, "spans": spans}
    assert waits_of({0: [Span("phase", "forward", 0.0, 1.0)]}) is None


def test_a_run_is_followed_as_it_grows(tmp_path: Path) -> None:
    sample = SampleRun(tmp_path / "run")
    run = WatchedRun(tmp_path / "run", "run")
    assert run.look()
    first = run.shown()
    assert (first["state"], first["last"]["step"], first["ranks"]) == ("running", None, {})
    revision = run.revision
    assert not run.look()
    assert run.revision == revision
    sample.add(45)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 46, "lo')
    assert run.look()
    assert run.revision > revision
    told = run.shown()
    assert told["last"]["step"] == 45
    assert told["figures"]["step"] == list(range(1, 46))
    assert told["figures"]["figures"]["loss"][39:41] == [None, None]
    assert {mark["text"] for mark in told["marks"] if mark["step"] == 40} == {
        "loss was nan",
        "grad_norm was inf",
        "grad_norm_clipped was nan",
        "update skipped: gradients were not finite",
    }
    assert told["events"]["figures"].keys() == {"validation loss"}
    assert list(told["ranks"]) == [0, 1, 2, 3]
    waited = {(waiting, last): seconds for waiting, last, seconds in told["waits"]["pairs"]}
    assert {last for _, last in waited} == {2}, "the slow rank"
    assert told["totals"][1]["steps"] == 45
    assert told["experts"].keys() == {"layers.1.mlp", "layers.3.mlp"}
    sample.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.5}\n')
    assert run.look()
    assert run.shown()["last"] == {"step": 46, "figures": {"loss": 1.5}}
    assert run.shown()["unread"] == 0


def test_a_run_that_has_ended_tells_all_there_is(tmp_path: Path) -> None:
    write_sample(tmp_path / "run", 60)
    run = WatchedRun(tmp_path / "run", "run")
    run.look()
    told = run.shown()
    assert told["state"] == "ended"
    assert told["alarms"][0]["text"].startswith("all wait for rank 2")
    assert [line["ranks"] for line in told["log"] if line["text"] == "the run has ended"] == [[0, 1, 2, 3]]
    assert [line["ranks"] for line in told["log"] if line["text"] == "the loader is slow"] == [[1]]
    assert told["pictures"]["pipeline.svg"].startswith("<svg")
    assert {last for _, last, _ in told["trace"]["pairs"]} == {2}
    assert "critical path" in told["trace"]["report"]
    json.dumps(told, allow_nan=False)


def test_a_run_without_more_than_steps_has_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "planned_nbytes": {"parameters": 5}}\n')
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "run.json").write_text("{")
    run = WatchedRun(tmp_path, "run")
    run.look()
    told = run.shown()
    assert told["figures"] == {"step": [1], "figures": {"loss": [2]}}
    assert told["planned"] == {"parameters": 5}
    empty = ("facts", "waits", "experts", "marks", "alarms", "log", "trace", "pictures", "state")
    assert not any(told[name] for name in empty)


def test_runs_have_names_that_differ(tmp_path: Path) -> None:
    for name in ("one/run", "two/run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    assert [run.name for run in open_runs([tmp_path / "one" / "run"])] == ["run"]
    assert [run.name for run in open_runs([tmp_path / "one/run", tmp_path / "two/run"])] == ["one/run", "two/run"]
    with pytest.raises(PolyaccelError) as caught:
        open_runs([tmp_path / "one/run", tmp_path / "two" / ".." / "one" / "run"])
    assert caught.value.value == str(tmp_path / "one/run")
    with pytest.raises(PolyaccelError) as caught:
        open_runs([tmp_path])
    assert caught.value.value == str(tmp_path)
    assert all(part in str(caught.value) for part in ("run.json", "metrics.jsonl"))
