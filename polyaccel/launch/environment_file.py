"""Files of variables for ranks: lines `NAME=VALUE`, read as a shell's `export` reads them.

[Note: Environment file syntax]
Quotes group and go, `\\` escapes, `$NAME`, `${NAME}` and `${NAME:-other}` are expanded outside of single quotes, by
this process's variables and those of earlier lines; one that is not set is empty. A backslash at the end of a line
continues it, `#` after a blank begins a comment. A value without `export` may have blanks (`A=two words`), and what a
shell would take for an end of the command (`A=x?a=1&b=2`), as in files of DeepSpeed. After `export` several names may
stand, and one without a value is that of this process. Nothing is run: `$(command)` is refused.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyaccel.errors import LaunchError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"([^\s=#'\"]*)[ \t]*=[ \t]*|([^\s=#'\"]+)")
_EXPORT = re.compile(r"export[ \t]+(?!=)")
_ALTERNATIVE = re.compile(r"(:?)([-+])")
_ENDS_A_COMMAND = ";&|<>()"
_HINT = "write NAME=VALUE, or NAME='VALUE' to have each character stand for itself"
_BOMS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}


def read_text(file: Path) -> str:
    """Read a file of lines: UTF-8, UTF-16 by its mark, undecodable bytes kept, Windows line ends."""
    data = file.read_bytes()
    encoding = next((name for mark, name in _BOMS.items() if data.startswith(mark)), "utf-8")
    return data.decode(encoding, errors="replace" if encoding == "utf-16" else "surrogateescape").replace("\r\n", "\n")


def read_environment(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Read a file's variables; values may name `environment`. See [Note: Environment file syntax]."""
    try:
        text = read_text(file)
    except OSError as error:
        raise LaunchError(
            f"the file of variables {file} cannot be read: {error}", hint="let this user read it", value=str(file)
        ) from error
    return _Scanner(file, text, environment).variables()


class _Scanner:
    """Reads the text of one file, from `_at` on."""

    def __init__(self, file: Path, text: str, environment: Mapping[str, str]) -> None:
        self._file, self._text, self._at = file, text, 0
        self._began = 0
        """Where the statement that is read begins: quotes may span lines."""
        self._known = dict(environment)

    def variables(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while self._skip_blank():
            self._began = self._at
            exports = _EXPORT.match(self._text, self._at)
            if exports is not None:
                self._at = exports.end()
            for name, value in self._statement(is_export=exports is not None):
                self._known[name] = found[name] = value
        return found

    def _statement(self, *, is_export: bool) -> Iterator[tuple[str, str]]:
        """The assignments of one statement."""
        while True:
            match = _KEY.match(self._text, self._at)
            name = "" if match is None else match[1] or match[2] or ""
            if match is None or _NAME.fullmatch(name) is None:
                raise self._wrong("no name of a variable stands there")
            if match[1] is None and not is_export:
                raise self._wrong(
                    f"{name} has no value" if self._is_at_end(match.end()) else "it is not a line NAME=VALUE"
                )
            self._at = match.end()
            if match[1] is not None:
                yield name, self._value(is_export=is_export)
            elif name in self._known:
                yield name, self._known[name]
            if not is_export:
                return
            while self._text[self._at : self._at + 1] in (" ", "\t"):
                self._at += 1
            if self._is_at_end(self._at):
                self._at = self._end_of_line()
                return
            if self._text[self._at] == ";":
                self._at += 1
                return
            if self._text[self._at] in _ENDS_A_COMMAND:
                raise self._wrong(f"{self._text[self._at]!r} ends the command in a shell")

    def _value(self, *, is_export: bool) -> str:
        """The value that begins here."""
        shown, kept = "", 0  # `kept`: what stays when blanks at the end go
        start = self._at
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "\n":
                break
            if char in " \t":
                if is_export:
                    break
                if self._text[self._at + 1 : self._at + 2] == "#":
                    self._at = self._end_of_line()
                    break
                shown, self._at = shown + char, self._at + 1
                continue
            if is_export and char in _ENDS_A_COMMAND:
                break
            if char == "#" and self._at == start:
                self._at = self._end_of_line()
                break
            before = self._text[self._at - 1] if self._at > start else ""
            shown += self._piece(is_first=self._at == start or before == ":")
            kept = len(shown)
        return self._checked(shown[:kept])

    def _piece(self, *, is_first: bool) -> str:
        """What the next characters, which are not blanks, stand for."""
        char = self._text[self._at]
        if char == "'":
            end = self._text.find("'", self._at + 1)
            if end < 0:
                raise self._wrong("a single quote is not closed")
            inside, self._at = self._text[self._at + 1 : end], end + 1
            return inside
        if char == '"':
            self._at += 1
            return self._until('"')
        if char == "\\":
            escaped = self._text[self._at + 1 : self._at + 2]
            self._at += 2
            return "" if escaped == "\n" else escaped
        if char in "$`":
            return self._expansion()
        self._at += 1
        if char == "~" and is_first and self._text[self._at : self._at + 1] in ("", "/", ":", " ", "\t", "\n"):
            return self._known.get("HOME", char)
        return char

    def _until(self, end: str) -> str:
        """What stands between here and `end`, as within double quotes."""
        found = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == end:
                self._at += 1
                return found
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\", "\n", "}"):
                escaped, self._at = self._text[self._at + 1], self._at + 2
                found += "" if escaped == "\n" else escaped
            elif char in "$`":
                found += self._expansion()
            else:
                found, self._at = found + char, self._at + 1
        raise self._wrong("a double quote is not closed" if end == '"' else "${ is not closed")

    def _expansion(self) -> str:
        """The value of what `$` or a backtick begins."""
        following = self._text[self._at + 1 : self._at + 2]
        if self._text[self._at] == "`" or following == "(":
            raise self._wrong("a command stands there, and none is run")
        if name := _NAME.match(self._text, self._at + 1):
            self._at = name.end()
            return self._known.get(name[0], "")
        if following != "{":
            if following and following in "0123456789?!#@*$-":
                raise self._wrong(f"${following} names no variable")
            self._at += 1
            return "$"
        name = _NAME.match(self._text, self._at + 2)
        if name is None:
            raise self._wrong("${ is not followed by the name of a variable")
        self._at, value = name.end(), self._known.get(name[0])
        if self._text[self._at : self._at + 1] == "}":
            self._at += 1
            return value or ""
        how = _ALTERNATIVE.match(self._text, self._at)
        if how is None:
            raise self._wrong(f"${{{name[0]} is followed by what is not read here")
        self._at = how.end()
        other = self._until("}")
        is_there = value is not None and (bool(value) or not how[1])
        if how[2] == "+":
            return other if is_there else ""
        return (value or "") if is_there else other

    def _skip_blank(self) -> bool:
        """Go to the next statement; False where there is none."""
        while self._at < len(self._text):
            if self._text[self._at] == "#":
                self._at = self._end_of_line()
            elif self._text[self._at].isspace() or self._text[self._at] == "\x1a":
                self._at += 1
            else:
                return True
        return False

    def _is_at_end(self, at: int) -> bool:
        return self._text[at : at + 1] in ("", "\n", "#")

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _checked(self, value: str) -> str:
        if "\0" in value:
            raise self._wrong("a value has a character NUL")
        return value

    def _wrong(self, what: str) -> LaunchError:
        number = 1 + self._text.count("\n", 0, self._began)
        return LaunchError(f"{self._file}, line {number}: {what}", hint=_HINT, value=number)
