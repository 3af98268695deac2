"""JSON as people write it: with `//`, `#` and `/* */` comments and trailing commas.

Comments and trailing commas are overwritten with spaces, so that every character keeps its line and column and the
parser of the standard library reports errors where the user sees them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from polyaccel.config.keys import dotted
from polyaccel.errors import ConfigError, Problem


def parse_json(text: str, *, source: str) -> tuple[Any, list[Problem]]:
    """Parse JSON; return the value and a problem for every repeated key. Raises ConfigError with the line."""
    try:
        tree = _parsed(text)
        repeated = list(_repeated(tree, ()))
    except RecursionError:
        problem = Problem("config", "...", "is nested too deeply to be read", "write a flatter config")
        raise ConfigError([problem], source=source) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        line = text.split("\n")[error.lineno - 1].strip()
        problem = Problem(place, line, f"is not JSON: {error.msg}", "only comments and trailing commas may be added")
        raise ConfigError([problem], source=source) from None
    except ValueError as error:  # of an integer with thousands of digits
        problem = Problem("config", "...", f"holds a number that cannot be read: {error}", "write a smaller number")
        raise ConfigError([problem], source=source) from None
    return tree, [
        Problem(dotted(path), tree_value, "is written twice in the same object", "keep one of them")
        for path, tree_value in repeated
    ]


def _parsed(text: str) -> Any:
    """The value of `text`, whose comments are looked for only where there must be some: that takes longer."""
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError:
        return json.loads(strip_comments(text), object_pairs_hook=_Object)


def strip_comments(text: str) -> str:
    """Replace comments and trailing commas by spaces, so that places stay."""
    out = list(text)
    previous = before_comma = ""  # the last significant character, and the one before the last comma
    comma = index = 0
    while index < len(text):
        char = text[index]
        if char == '"':
            index = _string_end(text, index)
        elif char == "#" or text.startswith(("//", "/*"), index):
            end = _comment_end(text, index)
            out[index:end] = [mark if mark == "\n" else " " for mark in text[index:end]]
            index = end
            continue
        elif char in "]}" and previous == "," and before_comma not in ("", "[", "{", ",", ":"):
            out[comma] = " "
        if not char.isspace():
            if char == ",":
                comma, before_comma = index, previous
            previous = char
        index += 1
    return "".join(out)


def _string_end(text: str, start: int) -> int:
    """Index of the quote that closes the string opened at `start`, or of the last character."""
    index = start + 1
    while index < len(text) and text[index] != '"':
        index += 2 if text[index] == "\\" else 1
    return min(index, len(text) - 1)


def _comment_end(text: str, start: int) -> int:
    """Index after the comment that begins at `start`; a line comment leaves its line end."""
    if text.startswith("/*", start):
        end = text.find("*/", start + 2)
        if end < 0:
            raise json.JSONDecodeError("this comment has no end", text, start)
        return end + 2
    end = text.find("\n", start)
    return len(text) if end < 0 else end


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys came twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs) if len(self) < len(pairs) else {}
        self.repeated = [name for name, count in counts.items() if count > 1]


def _repeated(tree: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(tree, _Object):
        yield from (((*path, name), tree[name]) for name in tree.repeated)
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, child in children:
        yield from _repeated(child, (*path, name))
