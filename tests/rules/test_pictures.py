"""The drawings of the documentation are those that docs/generate/pictures.py makes."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "docs" / "generate" / "pictures.py"))


def test_each_drawing_is_up_to_date() -> None:
    """To renew them: `python docs/generate/pictures.py`."""
    drawings = MADE["drawings"]()
    assert len(drawings) > 5
    for name, drawing in drawings.items():
        assert (MADE["PICTURES"] / name).read_text(encoding="utf-8") == drawing, name
