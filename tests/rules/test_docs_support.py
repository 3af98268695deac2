"""The support table has a row for every accelerator and comm backend that we declare, and docs/support.md has it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from polyaccel.registry import PluginGroup, list_plugins

ROOT = Path(__file__).parents[2]
TABLE = runpy.run_path(str(ROOT / "docs" / "generate" / "support_table.py"))


@pytest.mark.parametrize("group", [PluginGroup.ACCELERATORS, PluginGroup.COMM])
def test_every_plugin_of_ours_has_a_row(group: PluginGroup) -> None:
    ours = [info.name for info in list_plugins(group) if info.package == "polyaccel"]
    assert sorted(TABLE["support"]()[group.value.rpartition(".")[2]]) == ours


def test_the_page_has_the_table() -> None:
    """To renew it: `python docs/generate/support_table.py`."""
    page = TABLE["PAGE"].read_text(encoding="utf-8")
    assert TABLE["with_table"](page) == page


def test_what_was_not_run_says_so() -> None:
    plugins = [line.split("|") for line in TABLE["support_table"]().splitlines() if line.startswith("| `")]
    rows = {cells[1]: cells[3] for cells in plugins if len(cells) == 5}
    assert "not run on hardware" in rows[" `npu` "]
    assert "not run" not in rows[" `cpu` "]
