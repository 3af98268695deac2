"""Every decision about the architecture has a page of the same form, and its row in index and navigation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))}
MOST_WORDS = 250
"""Half a page."""


def test_pages_are_numbered_without_a_gap() -> None:
    assert [int(name[:3]) for name in PAGES] == list(range(1, len(PAGES) + 1))


def test_a_page_has_three_parts_on_half_a_page() -> None:
    for name, text in PAGES.items():
        assert re.findall(r"^## (.+)", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], name
        assert len(text.split()) <= MOST_WORDS, name


def test_index_and_navigation_list_them_in_order() -> None:
    titles = {name: text.splitlines()[0].removeprefix(f"# {name[:3]}. ") for name, text in PAGES.items()}
    index = (ROOT / "docs" / "adr" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+)\) \|$", index, re.MULTILINE)
    assert rows == [(name[:3], title, name) for name, title in titles.items()]
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.findall(r"^ +- adr/(\d.+)$", navigation, re.MULTILINE) == list(PAGES)
