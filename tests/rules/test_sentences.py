"""Sentences are short: in documents, and in docstrings of packages and plugins.

`python tests/rules/test_sentences.py` prints the figures, and `python tests/rules/test_sentences.py FILE ...` the
sentences of these files that are too long.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEDIAN, NINE_OF_TEN = 14, 25
"""Words that half of the sentences, and nine of ten, have at most. In documents all have `NINE_OF_TEN` at most."""
MOST_OF_A_PARAGRAPH = 80
"""Words of a paragraph or an item of a list in documents."""
SECTION = re.compile(r"(Args|Attributes|Examples?|Notes?|Raises|Returns|Yields):$")
ITEM = re.compile(r"^([-*+]|\d+\.|:)\s+")
INLINE = (
    (re.compile(r"<!--.*?-->"), " "),
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), " "),
    (re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)"), "Code"),
    (re.compile(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),
    (re.compile(r"https?://\S+"), "Link"),
    (re.compile(r"[*_]{1,2}(\w[^*_]*)[*_]{1,2}(?!\w)"), r"\1"),
)
"""Marks inside a line, and what a reader reads instead. Code and an address are a word."""
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.$")
END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
WORD = re.compile(r"[A-Za-z0-9]+(?:[-_'’./][A-Za-z0-9]+)*")


def blocks_of_markdown(text: str) -> Iterator[str]:
    """Yield paragraphs and list items. Code, tables, headings and directives are left out."""
    text = (
        re.sub(r"^---\n.*?^---\n", "", text, count=1, flags=re.MULTILINE | re.DOTALL) if text[:4] == "---\n" else text
    )
    lines = list[str]()
    fence = ""
    in_list = False
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        if fence:
            fence = "" if stripped == fence else fence
            continue
        mark = re.match(r"`{3,}|~{3,}", stripped)
        is_code = line.startswith("    ") and not lines and not in_list
        is_prose = bool(stripped) and not re.match(r"#|\||:::|===|!!!|\?\?\?|--8<--|<|\[[^\]]+\]:", stripped)
        if (mark or is_code or not is_prose or ITEM.match(stripped)) and lines:
            yield " ".join(lines)
            lines = []
        if mark:
            fence = mark[0]
        elif is_prose and not is_code:
            in_list = bool(ITEM.match(stripped)) or (in_list and line.startswith(" "))
            lines.append(ITEM.sub("", stripped.lstrip("> "), count=1) if not lines else stripped.lstrip("> "))


def blocks_of_docstring(text: str) -> Iterator[str]:
    """Yield paragraphs, list items and items of sections of a docstring, which `ast.get_docstring` cleaned."""
    prose = list[str]()
    section_indent = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if SECTION.match(line):
            section_indent = 0
            prose += ["", ""]
        elif section_indent is not None and line.strip():
            if not indent:
                section_indent = None
                prose.append(line)
            else:
                section_indent = section_indent or indent
                item = re.sub(r"^[*\w.\[\], ]+(\([^)]*\))?:\s", "", line.strip()) if indent == section_indent else line
                prose += ["", item.strip()] if indent == section_indent else [line.strip()]
        elif line.startswith((">>>", "...")):
            prose.append("")
        else:
            prose.append(re.sub(r"^\[Note: [^\]]*\]", "", line) if line.startswith("[Note: ") else line)
            prose += [""] if line.startswith("[Note: ") and line.endswith("]") else []
    yield from blocks_of_markdown("\n".join(prose))


def sentences(block: str) -> Iterator[str]:
    """Yield the sentences of a paragraph, without marks."""
    for pattern, replacement in INLINE:
        block = pattern.sub(replacement, block)
    start = 0
    for end in END.finditer(block):
        if not ABBREVIATION.search(block[: end.start()]):
            yield block[start : end.start()].strip()
            start = end.end()
    yield block[start:].strip()


def words(sentence: str) -> int:
    """Return how many words a sentence has."""
    return len(WORD.findall(sentence))


def sentences_of(file: Path) -> Iterator[str]:
    """Yield the sentences of a document, or of a module's docstrings, that have more than one word."""
    text = file.read_text(encoding="utf-8")
    blocks = blocks_of_markdown(text) if file.suffix == ".md" else docstring_blocks(text)
    for block in blocks:
        yield from (sentence for sentence in sentences(block) if words(sentence) > 1)


def docstring_blocks(source: str) -> Iterator[str]:
    """Yield the blocks of all docstrings of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from blocks_of_docstring(ast.get_docstring(node) or "")


def groups() -> dict[str, list[Path]]:
    """Return the files whose sentences are counted together. Text that is generated from code is not in documents."""
    generated = {"contracts.md", "torch_device.md", "faults.md", "architecture.md", "CHANGELOG.md"}
    documents = [*ROOT.glob("*.md"), *ROOT.glob("recipes/*.md"), *ROOT.glob("docs/**/*.md")]
    documents += ROOT.glob("plugins/*/README.md")
    return {
        "documents": [file for file in documents if file.name not in generated],
        "polyaccel": [*ROOT.glob("polyaccel/**/*.py")],
        "plugins": [*ROOT.glob("plugins/**/*.py")],
    }


@cache
def sentences_of_group(name: str) -> dict[Path, list[str]]:
    """Return the sentences of each file of a group."""
    return {file: [*sentences_of(file)] for file in groups()[name]}


def figures(texts: Iterable[str]) -> tuple[int, float, int, int]:
    """Return the number of sentences, the median and the 90th percentile of their words, and how many are too long."""
    lengths = sorted(map(words, texts))
    too_long = sum(length > NINE_OF_TEN for length in lengths)
    return len(lengths), statistics.median(lengths), lengths[len(lengths) * 9 // 10], too_long


@pytest.mark.parametrize("name", ["documents", "polyaccel", "plugins"])
def test_sentences_are_short(name: str) -> None:
    number, median, nine_of_ten, _ = figures(chain(*sentences_of_group(name).values()))
    assert number > 500
    assert median <= MEDIAN
    assert nine_of_ten <= NINE_OF_TEN


def test_no_sentence_of_a_document_is_too_long_and_no_paragraph() -> None:
    """Decisions of the past are left as they are."""
    pages = {file: texts for file, texts in sentences_of_group("documents").items() if "adr" not in file.parts}
    assert [text for texts in pages.values() for text in texts if words(text) > NINE_OF_TEN] == []
    blocks = chain(*(blocks_of_markdown(file.read_text(encoding="utf-8")) for file in pages))
    assert [block for block in blocks if words(block) > MOST_OF_A_PARAGRAPH] == []


def test_readme_is_read_at_a_glance() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert figures(sentences_of(readme))[1] <= 12


def test_a_long_sentence_is_counted() -> None:
    long = " ".join(["Word"] * 40)
    assert figures([*sentences(f"Short one here. {long}. Short again.")]) == (3, 3, 40, 1)


def test_code_tables_and_headings_are_no_sentences() -> None:
    prose = "One is `a. B c` here (e.g. This). Two\nis [a link](x.md).\n"
    page = f"# A heading\n\n{prose}\n| a | b |\n|---|---|\n\n```python\nx = 1\n```\n"
    (block,) = blocks_of_markdown(page)
    assert [*map(words, sentences(block))] == [6, 4]


def test_an_item_of_a_list_is_a_sentence_by_itself() -> None:
    page = "Both: two\n- one thing\n  and more\n- another\n\n    more of it\n\nThe end.\n\n    code()\n"
    assert [*blocks_of_markdown(page)] == ["Both: two", "one thing and more", "another", "more of it", "The end."]


def test_an_item_of_a_section_is_a_sentence_by_itself() -> None:
    sections = "Args:\n    a: One thing,\n        and more.\n    b: Another.\n\nReturns:\n    A value.\n"
    blocks = [*blocks_of_docstring(f"Do it.\n\n[Note: A title]\nWhy it is done.\n\n{sections}")]
    assert blocks == ["Do it.", "Why it is done.", "One thing, and more.", "Another.", "A value."]


def report() -> Iterator[str]:
    """Yield the lines of a table: each group, and each package of the groups of code."""
    yield f"{'':40} sentences  median  90th  over {NINE_OF_TEN}"
    for name in groups():
        parts = defaultdict[str, list[str]](list)
        for file, texts in sentences_of_group(name).items():
            inside = file.relative_to(ROOT)
            parts[name] += texts
            if len(inside.parts) > 2 or name == "documents":
                parts["/".join(inside.parts[: 3 if name == "documents" else 2])] += texts
        for part, texts in parts.items():
            if texts:
                number, median, nine_of_ten, too_long = figures(texts)
                yield f"{part:40} {number:9} {median:7} {nine_of_ten:5} {too_long:7}"


if __name__ == "__main__":
    if sys.argv[1:]:
        for file in map(Path, sys.argv[1:]):
            for text in sentences_of(file):
                if words(text) > NINE_OF_TEN:
                    print(f"{file}: {words(text)}: {text}")
    else:
        print(*report(), sep="\n")
