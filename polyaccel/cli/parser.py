"""A parser whose options may leave their value out although a script follows: `--debugpy train.py` is not a port."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

_MOST_PORT = 65535


class JobParser(argparse.ArgumentParser):
    """Gives an option with an optional value (`nargs="?"`) the next word only where the option's `type` takes it, and
    looks no further than the first word that is not an option's. Of `abbreviated`, names of options, a beginning that
    only one of them has stands for it."""

    abbreviated: Sequence[str] = ()
    keeps_words = False
    """Whether the words that were parsed are kept, as `words` of the namespace."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._by_name: dict[str, argparse.Action] = {}
        super().__init__(*args, **named)

    def add_argument(self, *args: Any, **named: Any) -> argparse.Action:
        action = super().add_argument(*args, **named)
        self._by_name.update(dict.fromkeys(action.option_strings, action))
        return action

    def retype(self, name: str, type_: Callable[[str], Any]) -> None:
        """Let `type_` read the value of the option of that name from now on."""
        self._by_name[name].type = type_

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found, left = super().parse_known_args(None if args is None else self._settled(list(args)), namespace)
        if self.keeps_words:
            found.words = tuple(args or ())
        return found, left

    def _settled(self, words: list[str]) -> list[str]:
        settled: list[str] = []
        while words and words[0].startswith("-") and words[0] != "--":
            settled.append(word := self._whole(words.pop(0)))
            action = self._by_name.get(word)  # not `--name=value`, which has its value
            if action is None:
                continue
            if action.nargs == "?":
                has_value = bool(words) and _takes(action, words[0])
                settled[-1] = f"{word}={words.pop(0) if has_value else action.const}"
            elif action.nargs is None and words:
                settled.append(words.pop(0))
        return settled + words

    def _whole(self, word: str) -> str:
        """`word` with the name that it begins in place of the beginning."""
        begun, mark, value = word.partition("=")
        if begun in self._by_name or not begun.startswith("--"):
            return word
        names = [name for name in self.abbreviated if name.startswith(begun)]
        meant = {id(self._by_name[name]) for name in names}
        if len(meant) > 1:
            self.error(f"ambiguous option: {begun} could match {', '.join(names)}")
        return f"{names[0]}{mark}{value}" if names else word


def _takes(action: argparse.Action, word: str) -> bool:
    try:
        return not callable(action.type) or action.type(word) is not None
    except (argparse.ArgumentTypeError, ValueError):
        return False


def whole_number(what: str, least: int = 0, most: int = 999_999_999) -> Callable[[str], int]:
    """Return the parser of a whole number from `least` to `most`; its error says that the text is not `what`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return parse


def non_negative(what: str) -> Callable[[str], float]:
    """Return the parser of a finite number of 0 or more."""
    return _number(what, lambda number: 0 <= number < inf)


def positive(what: str, limit: float = inf) -> Callable[[str], float]:
    """Return the parser of a number above 0 and below `limit`."""
    return _number(what, lambda number: 0 < number < limit)


def _number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -inf
        if not fits(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return parse


port = whole_number(f"a port from 1 to {_MOST_PORT}", 1, _MOST_PORT)
port_or_auto = whole_number(f"a port from 1 to {_MOST_PORT}, or auto", 1, _MOST_PORT)
