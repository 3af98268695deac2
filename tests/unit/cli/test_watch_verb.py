"""`polyaccel watch`: the runs that its arguments name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polyaccel.cli.main import main
from polyaccel.cli.watch import chosen_runs
from polyaccel.errors import PolyaccelError


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two runs, of which `b` was written last, and of another folder."""
    for at, name in enumerate(("b", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        file = tmp_path / "runs" / name / "metrics.jsonl"
        file.touch()
        os.utime(file, (1000 - at, 1000 - at))
    (tmp_path / "runs" / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    return Path("runs")


@pytest.mark.parametrize(
    ("named", "expected"),
    [([], ["b"]), (["runs"], ["b", "a"]), (["runs/a"], ["a"]), (["runs/a", "runs/b"], ["a", "b"])],
    ids=["the newest", "a folder of runs", "a run", "runs"],
)
def test_runs_are_chosen(runs: Path, named: list[str], expected: list[str]) -> None:
    assert [run.name for run in chosen_runs([Path(each) for each in named])] == expected


def test_a_folder_without_runs_is_an_error(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["watch", "runs/other"]) == 1
    assert "runs/other is not a run's folder" in capsys.readouterr().err
    with pytest.raises(PolyaccelError) as caught:
        chosen_runs([Path("run")])
    assert (caught.value.value, caught.value.hint) == ("run", "did you mean runs?")
    with pytest.raises(PolyaccelError) as caught:
        chosen_runs([Path("unlike")])
    assert caught.value.value == "unlike"
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(PolyaccelError) as caught:
        chosen_runs([])
    assert caught.value.value == "runs"
