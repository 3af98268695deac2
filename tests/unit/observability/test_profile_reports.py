"""A profile as a table and as a picture."""

from __future__ import annotations

import logging
from pathlib import Path
from xml.etree import ElementTree

import pytest

from polyaccel.observability.profiles import (
    FLAME_FILE,
    ProfileNode,
    ProfileSettings,
    TableStyle,
    flame_svg,
    profile_table,
    report_profile,
    shown,
    tree_of,
)

NODES = {
    "": ProfileNode("", "Net", 3000, 4000, 0.01, 1),
    "body": ProfileNode("body", "Block", 2000, 3000, 0.006, 1),
    "body.up<1>": ProfileNode("body.up<1>", "Linear", 1500, 2000, 0.004, 2),
    "body.down": ProfileNode("body.down", "Linear", 500, 1000, 0.002, 1),
    "head": ProfileNode("head", "Linear", 1000, 1000, 0.003, 1),
}
ROOT = tree_of(NODES)
_SVG = "{http://www.w3.org/2000/svg}"


def test_the_table_has_a_row_for_each_module_down_to_a_depth() -> None:
    text = profile_table(ROOT, "title", TableStyle(top=2, recomputed=1.0))
    lines = text.splitlines()
    assert lines[0] == "title"
    assert "parameters 3 K, MACs 2 K, FLOPs 4 K in the forward pass, 16 K with its backward" in lines[1]
    assert "forward 10 ms, 400 KFLOPS" in lines[1]
    assert "  depth 1: Block 3 KFLOPs (75.0 %) in 6 ms, Linear 1 KFLOPs (25.0 %) in 3 ms" in lines
    rows = [line.split() for line in lines if "Linear " in line and "depth" not in line]
    assert ["up<1>", "Linear", "2", "1.5", "K", "1", "K", "2", "K", "50.0", "%", "4", "40.0", "%", "500", "K"] in rows
    assert "up<1>" not in profile_table(ROOT, "title", TableStyle(depth=1))
    assert "Block  " not in profile_table(ROOT, "title", TableStyle(detailed=False))


def test_the_picture_is_svg_whose_widths_are_times() -> None:
    root = ElementTree.fromstring(flame_svg(ROOT, "a <title>"))
    widths = {}
    for group in root.iter(f"{_SVG}g"):
        title, box = group.find(f"{_SVG}title"), group.find(f"{_SVG}rect")
        assert title is not None and title.text and box is not None  # noqa: PT018 - of the file's form
        widths[title.text.partition(" ")[0]] = (float(box.get("x", "")), float(box.get("width", "")))
    assert widths["model"] == (0, 1200)
    assert widths["body"] == (0, 720)
    assert widths["body.up<1>"] == (0, 480)
    assert widths["head"] == (720, 360)
    untimed = tree_of({name: ProfileNode(name, "scope", None, one.operations, None, 1) for name, one in NODES.items()})
    assert 'width="900.00"' in flame_svg(untimed, "operations")


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0"), (999, "999"), (1000, "1 K"), (29.4e6, "29.4 M"), (2e18, "2e+03 P")]
)
def test_numbers_have_three_digits(number: float, said: str) -> None:
    assert shown(number) == said


def test_a_profile_goes_where_the_config_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "polyaccel"):
        report_profile(ROOT, "to the log", ProfileSettings(step=1, folder=str(tmp_path / "run")))
        report_profile(ROOT, "to a file", ProfileSettings(step=1, output_file=str(tmp_path / "out" / "table.txt")))
        (tmp_path / "taken").write_text("")
        report_profile(ROOT, "nowhere", ProfileSettings(step=1, output_file=str(tmp_path / "taken" / "table.txt")))
    assert "up<1>" in caplog.text.partition("to a file")[0]
    assert (tmp_path / "run" / FLAME_FILE).read_text().startswith("<svg")
    assert "up<1>" in (tmp_path / "out" / "table.txt").read_text()
    assert (tmp_path / "out" / "table.svg").exists()
    assert "the profile could not be written" in caplog.text
