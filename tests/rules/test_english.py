"""Words that `docs/writing.md` avoids (rules 5 and 6) stay out of docstrings, comments, messages and documents."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
AVOIDED = re.compile(
    r"""\b(?:
    besides? | anew | alike | foret(?:old|ells?|elling) | told | tells | nobody | somebody | whoever | hears? | heard
    | but\s+for | let(?:s|ting)?\s+go\s+of | go(?:es|ing)?\s+on(?!\s+(?:the|an?|disk)\b)
    | (?<!\bthere\s)is\s+no(?!\s+(?:longer|more|less|better|other|need)\b)
    | of\s+(?:its|their)\s+own(?=[.,;:)]|$|\s+(?:and|as|by|for|from|in|on|that|to|where|which|while|with)\b)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
TERMS = re.compile(r"`[^`\n]*`|\{[^{}]*\}|https?://\S+")
"""What is not English in a text: names in backticks, fields of f-strings, addresses."""
CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Each text of a file, with its first line: strings and comments of Python, prose of Markdown."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield 1, CODE.sub(lambda block: "\n" * block[0].count("\n"), source)
        return
    begin, comment = 1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            begin, comment = (begin if comment else token.start[0]), f"{comment}{token.string.lstrip('#')}\n"
        elif token.type != tokenize.NL:
            if comment:
                yield begin, comment
            comment = ""
        if tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE") and " " in token.string:
            yield token.start[0], token.string


def found(file: Path) -> list[str]:
    """Each avoided word of a file, as `file:line: word`."""
    if not AVOIDED.search(file.read_text(encoding="utf-8")):
        return []
    lines = []
    for begin, text in texts(file):
        prose = TERMS.sub(lambda term: "`" + "\n" * term[0].count("\n"), text)
        for match in AVOIDED.finditer(prose):
            line = begin + prose.count("\n", 0, match.start())
            lines.append(f"{file.relative_to(ROOT)}:{line}: {' '.join(match[0].split())}")
    return lines


def files() -> list[Path]:
    """What is read: the rules themselves, the glossary's avoided names and the decisions of the past are not."""
    both = (file for folder in ("polyaccel", "plugins") for file in (ROOT / folder).rglob("*.py"))
    code = [file for file in both if "build" not in file.relative_to(ROOT).parts]  # copies of installations
    docs = [file for file in (ROOT / "docs").rglob("*.md") if "adr" not in file.parts]
    docs += [*ROOT.glob("*.md"), *ROOT.glob("recipes/*.md"), *ROOT.glob("plugins/*/README.md")]
    left_out = {ROOT / "docs" / "writing.md", ROOT / "docs" / "glossary.md"}
    return sorted({*code, *docs} - left_out)


def test_avoided_words_do_not_come_back() -> None:
    lines = [line for file in files() for line in found(file)]
    assert not lines, "\n".join(lines)
