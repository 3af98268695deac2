"""Every environment variable of ours that the code reads or sets stands in the documentation, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\b(?:POLYACCEL_[A-Z][A-Z_]*[A-Z]|DS_ACCELERATOR)\b")


def test_the_page_has_the_variables_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "polyaccel").rglob("*.py"))
    assert set(VARIABLE.findall(page)) == set(VARIABLE.findall(code))
