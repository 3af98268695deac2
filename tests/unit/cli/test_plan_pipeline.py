"""`polyaccel plan --pipeline`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyaccel.cli.main import main

ASKED = ["plan", "--pipeline", "1f1b", "--stages", "4", "--micro-batches", "12"]


def test_a_schedule_is_told_with_its_bubble_and_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1f1b: 4 stages, 12 micro-batches, 4 chunks of the model. Narayanan et al." in said
    assert "Checked: 96 tasks, each once and after what it needs; 72 messages" in said
    assert "makespan 45, bubble 20.0 %" in said
    assert "0 0 24 4 12 36 9 9 1 1 24 3 24 36 9 6" in said


def test_figures_are_there_as_json_and_times_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json", "--times", "1,1.5,0.5", "--transfer", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schedule"], found["micro_batches"], found["placement"]) == ("1f1b", 12, [0, 1, 2, 3])
    assert found["makespan"] == pytest.approx(45)
    assert found["bubble_share"] == pytest.approx(0.2)
    assert [stage["most_live"] for stage in found["stages"]] == [4, 3, 2, 1]


def test_a_table_that_was_written_is_planned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "table.csv", tmp_path / "picture.svg"
    asked = ["plan", "--pipeline", "interleaved", "--stages", "2", "--micro-batches", "4", "--chunks", "3", "--json"]
    assert main([*asked, "--csv", str(table), "--svg", str(picture)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert picture.read_text(encoding="utf-8").startswith("<svg ")
    assert main(["plan", "--pipeline", str(table), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**first, "schedule": "table.csv"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pipeline", "1f1b", "--micro-batches", "4"], "1f1b needs --stages"),
        (["--pipeline", "1f1b", "--stages", "4"], "1f1b needs --micro-batches"),
        (["--pipeline", "1f1b", "--stages", "4", "--micro-batches", "-1"], "-1 micro-batches"),
        (["--pipeline", "zigzag", "--stages", "4", "--micro-batches", "4"], "no schedule is named 'zigzag'"),
        (["--pipeline", "mine.csv", "--stages", "4"], "--stages 4, and mine.csv sets that itself"),
        (["--pipeline", "absent.csv"], "absent.csv cannot be read"),
        ([*ASKED[1:], "--svg", "absent/folder/a.svg"], "absent/folder/a.svg cannot be written"),
    ],
    ids=["stages", "micro-batches", "negative", "name", "twice", "file", "picture"],
)
def test_what_cannot_be_planned_is_told(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["config.json", "1e9", "-n", "2", "--pipeline", "1f1b"], "--pipeline takes no CONFIG"),
        (["config.json"], "give MODEL, --ranks"),
        ([*ASKED[1:], "--times", "1,2"], "'1,2' is not three times"),
        ([*ASKED[1:], "--times", "1,2,0"], "'0' is not a number"),
        ([*ASKED[1:], "--transfer", "-1"], "'-1' is not a time"),
    ],
    ids=["model", "nothing", "two times", "no time", "negative"],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err
