"""A user's own table in a file: what is written is read, and what is wrong is told by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyaccel.pipeline.csv_schedule import read_table, write_table
from polyaccel.pipeline.render import to_svg
from polyaccel.pipeline.schedules import SCHEDULES, make_table
from polyaccel.pipeline.table import PipelineError
from polyaccel.pipeline.timing import OpTimes, simulate

HEAD = "slot,stage,op,micro_batch,chunk"
MINE = f"{HEAD}\n0,0,FORWARD,0,0\n1,0,BACKWARD,0,0\n0,1,FORWARD,0,1\n1,1,BACKWARD,0,1\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.csv"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_table_that_is_written_is_read(schedule: str, tmp_path: Path) -> None:
    table = make_table(schedule, 3, 5)
    read = read_table(written(tmp_path, write_table(table)))
    assert (read.tasks, read.placement, read.micro_batches) == (table.tasks, table.placement, table.micro_batches)
    assert all(one <= other for one, other in zip(read.most_live, table.most_live, strict=True))


def test_slots_and_not_lines_say_the_order(tmp_path: Path) -> None:
    lines = MINE.splitlines()
    read = read_table(written(tmp_path, "\n".join([lines[0], *reversed(lines[1:]), ""])))
    assert read.tasks == read_table(written(tmp_path, MINE)).tasks


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (HEAD, "stage,op,micro_batch,chunk", (":1", "stage,op,micro_batch,chunk")),
        ("0,0,FORWARD,0,0\n", "0,0,FORWARD,0\n", (":2", "4")),
        ("1,0,BACKWARD,0,0", "1,0,BACK,0,0", (":3", "'BACK'", "FORWARD, BACKWARD,")),
        ("1,0,BACKWARD,0,0", "1,0,BACKWARD,first,0", (":3", "micro_batch", "'first'")),
        ("1,0,BACKWARD,0,0", "1,0,BACKWARD,-1,0", (":3", "micro_batch", "'-1'")),
        ("1,0,BACKWARD,0,0", "0,0,BACKWARD,0,0", (":3", "stage 0", "BACKWARD of micro-batch 0", "slot 0", "line 2")),
        ("1,1,BACKWARD,0,1", "1,0,BACKWARD,0,1", (":5", "stage 0", "BACKWARD of micro-batch 0", "chunk 1", "stage 1")),
        ("1,1,BACKWARD,0,1", "1,1,FORWARD,0,1", (":5", "stage 1", "step 1", "FORWARD of micro-batch 0")),
        ("0,1,FORWARD,0,1", "2,1,FORWARD,0,1", (":5", "stage 1", "step 0", "BACKWARD of micro-batch 0")),
        ("1,1,BACKWARD,0,1", "1,3,BACKWARD,0,2", ("stage 2",)),
        ("1,1,BACKWARD,0,1", "1,1,BACKWARD,0,7", ("chunk 2",)),
        ("1,1,BACKWARD,0,1", "1,1,BACKWARD,999999999,1", ("stage 0", "FORWARD of micro-batch 1", "chunk 0")),
    ],
)
def test_what_is_wrong_is_told_by_file_and_line(tmp_path: Path, old: str, new: str, named: tuple[str, ...]) -> None:
    assert old in MINE
    with pytest.raises(PipelineError) as caught:
        read_table(written(tmp_path, MINE.replace(old, new)))
    assert all(part in str(caught.value) for part in ("mine.csv", *named))


@pytest.mark.parametrize("text", ["", f"{HEAD}\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PipelineError) as caught:
        read_table(written(tmp_path, text))
    assert "mine.csv" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        read_table(tmp_path / "absent.csv")
    assert "absent.csv" in str(caught.value)


def test_the_picture_has_a_row_a_stage_and_each_micro_batch() -> None:
    table = make_table("zb-v", 3, 6)
    picture = to_svg(simulate(table, OpTimes.even(table.chunks)))
    assert picture.startswith("<svg ")
    assert picture.rstrip().endswith("</svg>")
    assert [f">stage {stage}<" in picture for stage in range(4)] == [True, True, True, False]
    bars = sum(map(len, table.tasks))
    assert picture.count("z") >= bars
    assert picture.count('text-anchor="middle"') == bars
    assert "3 stages, 6 micro-batches, makespan 38, bubble 5.3 %" in picture
    legend = (">forward<", ">backward, input<", ">backward, weight<", ">paler: later chunks<")
    assert all(said in picture for said in legend)
