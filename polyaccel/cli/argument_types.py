"""Values of options, as `type` of argparse's arguments: each raises ArgumentTypeError, which argparse reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf

_MOST_PORT = 65535


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
