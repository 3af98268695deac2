"""Every parameter, result and field of the documented API is described in a Google-style section.

The documented API is what docs/reference/api.md and docs/reference/contracts.md show.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

from contracts import SECTIONS  # noqa: E402
from documented_api import documented, gaps  # noqa: E402
from google_docstring import split  # noqa: E402

TODO_API: frozenset[str] = frozenset()
"""Names of docs/reference/api.md whose sections are not written yet."""
TODO_CONTRACTS: frozenset[str] = frozenset()
"""Names of docs/reference/contracts.md whose sections are not written yet."""


def test_the_documented_api_has_sections() -> None:
    todo = TODO_API | TODO_CONTRACTS
    found = [gap for one in documented(SECTIONS) if one.name not in todo for gap in gaps(one)]
    assert found == []


def test_what_is_done_is_not_left_to_do() -> None:
    lacking = {one.name for one in documented(SECTIONS) if any(gaps(one))}
    assert lacking >= TODO_API | TODO_CONTRACTS


def test_a_docstring_is_split_into_sections() -> None:
    doc = split(
        """Return a part.

        More of it.

        Args:
            buffer: The whole. It
                goes on.
            *rest: Others.

        Returns:
            A view, two
            lines.

        Raises:
            ShardingError: It does not fit.
        """
    )
    assert doc.prose == "Return a part.\n\nMore of it."
    assert doc.named["Args"] == {"buffer": "The whole. It goes on.", "*rest": "Others."}
    assert doc.named["Raises"] == {"ShardingError": "It does not fit."}
    assert doc.plain == {"Returns": "A view, two lines."}
