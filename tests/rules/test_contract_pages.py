"""The pages on contracts have what the modules say, and leave out no module that a plugin may import."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

from contracts import SECTIONS, contracts, needs, with_part  # noqa: E402

PAGES = {"reference/contracts.md": contracts, "torch_device.md": needs}
BASES = {"polyaccel.comm.composed", "polyaccel.comm.objects"}
"""Modules that no plugin imports, and whose classes a contract derives from."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_what_the_modules_say(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text == with_part(text, PAGES[page]()), "renew it: PYTHONPATH=. python docs/generate/contracts.py"


def test_every_module_of_the_table_with_names_of_its_own_stands_below_it() -> None:
    text = (ROOT / "docs" / "reference" / "contracts.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(polyaccel[\w.]*)` \|", text, re.MULTILINE)
    told = {module for modules in SECTIONS.values() for module in modules}
    assert told - set(table) == BASES
    devices = {f"polyaccel.accelerators.{name}" for name in ("cpu", "cuda", "mps", "npu", "xpu")}
    rest = {module for module in table if not module.startswith("polyaccel.testkit.")} - told - devices
    assert rest == {"polyaccel", "polyaccel.accelerators"}


@pytest.mark.parametrize(
    "line",
    [
        "- `ReduceFn(target: Buffer, source: Buffer, op: ReduceOp) -> None`: Compute `target[i] = op(target[i], ",
        "- `CountedBuffer(writes: WriteCount | None=None)`",
        "- `Collective(operation: Operation, source: Buffer | None=None, target: Buffer | None=None, numel: int=0,",
        "- `SUM`, `AVG`, `MAX`, `MIN`, `PROD`\n",
    ],
    ids=["a protocol", "a base class", "a value", "an enumeration"],
)
def test_how_a_thing_is_called_or_made_is_told(line: str) -> None:
    assert line in contracts()
