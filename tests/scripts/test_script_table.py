"""The table of public scripts: enough of enough projects, pinned, and changed in no line about DeepSpeed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import script_library_shims
from script_page import BEGIN, END, counts, page, put
from script_page import SHIMS as EXPLAINED
from script_runs import ABOUT_DEEPSPEED, apart, prepare, scripts
from script_shims import SHIMS

assert script_library_shims
ROWS = scripts()
HERE = Path(__file__).parent


def test_there_are_enough_scripts() -> None:
    assert len([row for row in ROWS if row["group"] == "scripts"]) >= 40
    assert len({row["repository"] for row in ROWS}) >= 20
    assert len({row["name"] for row in ROWS}) == len(ROWS)


def test_every_row_is_pinned_and_touches_no_line_about_deepspeed() -> None:
    for row in ROWS:
        assert re.fullmatch("[0-9a-f]{40}", row["commit"]), row["name"]
        for pairs in row.get("smaller", {}).values():
            assert not any(ABOUT_DEEPSPEED.search(text) for pair in pairs for text in pair), row["name"]
        shims = {name for name in row.get("shims", []) if not name.startswith("absent:")}
        assert shims <= SHIMS.keys() | {"joined"}, row["name"]
        assert shims <= EXPLAINED.keys(), row["name"]


def test_expected_losses_are_of_rows() -> None:
    expected = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    assert expected.keys() <= {row["name"] for row in ROWS}


def test_losses_are_compared_one_by_one() -> None:
    assert apart([[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0]]) == 0.0
    assert apart([[1.0, 2.0]], [[1.0, 1.0]]) == 1.0
    assert apart([[1.0]], [[1.0, 1.0]]) == float("inf")
    assert apart([[], []], [[], []]) == float("inf")


def test_files_come_from_a_commit_with_smaller_sizes(tmp_path: Path) -> None:
    source = tmp_path / "mirror" / "someone+project" / "repo"
    source.mkdir(parents=True)
    (source / "train.py").write_text("SIZE = 4096\n", encoding="utf-8")
    (source / "ds.json").write_text('{"train_batch_size": 64, "fp16": {"enabled": true}}', encoding="utf-8")
    (source / "other.py").write_text("unused\n", encoding="utf-8")
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    row = {
        "name": "one", "repository": "someone/project", "commit": commit, "path": "train.py",
        "files": ["train.py", "ds.json"], "smaller": {"train.py": [["4096", "32"]]},
        "config": {"ds.json": {"train_batch_size": 4, "fp16.enabled": False}},
    }  # fmt: skip
    work = prepare(row, [tmp_path / "mirror"], tmp_path / "out")
    assert (work / "train.py").read_text(encoding="utf-8") == "SIZE = 32\n"
    assert json.loads((work / "ds.json").read_text(encoding="utf-8")) == {
        "train_batch_size": 4,
        "fp16": {"enabled": False},
    }
    assert not (work / "other.py").exists()
    with pytest.raises(ValueError) as caught:
        prepare({**row, "smaller": {"train.py": [["absent", "1"]]}}, [tmp_path / "mirror"], tmp_path / "out")
    assert "'absent'" in str(caught.value)


def test_the_page_has_a_row_for_each_result() -> None:
    row = {**ROWS[0], "name": "one"}
    text = page([row], {"one": [[1.5, 0.5]]}, {"one": {"result": "equal", "apart": 2e-7, "date": "2026-11-29"}})
    assert "1 scripts of 1 projects: 1 equal" in text
    assert "1.500000, 0.500000 | equal, 2e-07 apart |" in text


def test_the_page_has_a_column_for_each_mesh() -> None:
    meshes = {
        "one, tensor 2": {"result": "equal", "apart": 0.0},
        "one, pipeline 2": {"result": "refused", "apart": 1.0, "why": "no stages"},
        "one, expert 2": {"result": "refused", "apart": 1.0, "why": "no experts"},
        "two, expert 2": {"result": "refused", "apart": 1.0, "why": "no experts"},
    }
    text = page([], {}, {}, meshes)
    assert "| one | equal, to the bit | not run | refused (1) | refused (2) |" in text
    assert "| two | not run | not run | not run | refused (2) |" in text
    assert "1. no stages\n2. no experts\n" in text


def test_counts_stand_between_their_marks() -> None:
    row = {**ROWS[0], "name": "one"}
    meshes = {"one, tensor 2": {"result": "equal", "date": "2026-11-30"}, "one, expert 2": {"result": "refused"}}
    part = counts([row], {"one": {"result": "failed", "date": "2026-11-29"}}, meshes)
    assert "2026-11-30: 1 scripts of 1 projects, and 2 runs" in part
    assert "| scripts | 1 | 0 | 0 | 0 | 0 | 1 |\n| trainers over meshes | 2 | 1 | 0 | 0 | 1 | 0 |" in part
    assert put(f"before\n{BEGIN}\nold\n{END}\nafter", part) == f"before\n{part}\nafter"


def test_shims_of_devices_leave_the_meta_device_alone() -> None:
    """A model of transformers is built there; else its rotary frequencies are memory that nobody wrote."""
    program = """
import torch
from script_shims import SHIMS
SHIMS["devices"]()
with torch.device("meta"):
    made = [torch.arange(4), torch.ones(2), torch.empty(2), torch.rand(2), torch.tensor([1.0])]
print([value.device.type for value in made], torch.zeros(2, device="cuda").device.type)
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=HERE, check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == f"{['meta'] * 5} cpu"
