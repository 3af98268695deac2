"""Each `[Note: Title]` of the code is defined once, its title has some words, and each reference leads to one."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

import notes  # noqa: E402

REFERENCE = re.compile(r"\[Note: ([^\]`.]+)\]")
TITLES = [title for title, _ in notes.definitions()]
NOT_NOUNS = {"how", "what", "when", "where", "which", "who", "whose", "why"}


def references() -> Iterator[str]:
    for folder in ("polyaccel", "csrc", "plugins", "tests", "docs"):
        for file in (ROOT / folder).rglob("*"):
            is_code = file.suffix in {".py", ".h", ".cpp"} and not {"rules", "generate", "build"} & {*file.parts}
            if is_code or (file.suffix == ".md" and file.name != "writing.md"):
                for title in REFERENCE.findall(file.read_text(encoding="utf-8")):
                    yield re.sub(r"\s*\n\s*(#|//)?\s*", " ", title)


def test_a_title_is_unique() -> None:
    assert len(TITLES) > 150
    assert {title: number for title, number in Counter(TITLES).items() if number > 1} == {}


def test_a_title_is_a_noun_phrase_of_some_words() -> None:
    assert [title for title in TITLES if len(title.split()) < 2 or title.split()[0].lower() in NOT_NOUNS] == []


def test_a_reference_leads_to_a_note() -> None:
    assert set(references()) - set(TITLES) == set()


def test_the_page_lists_all() -> None:
    page = notes.notes()
    assert all(f"| {title} | [{file.stem}](../../{file}) |" in page for title, file in notes.definitions())
