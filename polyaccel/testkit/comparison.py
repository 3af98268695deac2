"""How contracts compare: what was expected, what came instead, and where, in the one line that a table shows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from polyaccel.errors import PolyaccelError

_MOST_SHOWN = 200


def equal(found: object, expected: object, what: str) -> None:
    """Raise AssertionError unless `found` equals `expected`."""
    if found != expected:
        raise AssertionError(f"{what}: expected {shown(expected)}, got {shown(found)}")


def same_numbers(
    found: npt.ArrayLike, expected: npt.ArrayLike, what: str, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Raise AssertionError where two arrays differ by more than the tolerances; NaN equals NaN, infinities themselves.

    The message has the first element that differs and how many do.
    """
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    equal(found.shape, expected.shape, f"{what}, shape")
    differ = ~np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    if not differ.any():
        return
    first = tuple(int(index) for index in np.argwhere(differ)[0])
    place = "" if not first else f" at element {first[0] if len(first) == 1 else first}"
    bound = f"; allowed: {rtol:.1e} of it and {atol:.1e}" if rtol or atol else ""
    raise AssertionError(
        f"{what}: expected {expected[first]:.9g}, got {found[first]:.9g}{place}; "
        f"{np.count_nonzero(differ)} of {differ.size} differ{bound}"
    )


def same_bytes(found: bytes, expected: bytes, what: str) -> None:
    """Raise AssertionError unless the bytes are the same; the message has the first one that differs."""
    equal(len(found), len(expected), f"{what}, bytes")
    if found != expected:
        pairs = zip(found, expected, strict=True)
        at = next(index for index, (one, other) in enumerate(pairs) if one != other)
        here, there = found[at : at + 8].hex(" "), expected[at : at + 8].hex(" ")
        raise AssertionError(f"{what}: expected {there}, got {here} at byte {at} of {len(found)}")


def refused(action: Callable[[], object], what: str, kind: type[PolyaccelError] = PolyaccelError) -> None:
    """Check that `action` raises `kind`, an error of ours: callers catch that class, and no other."""
    try:
        answer = action()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what}: expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what} was accepted: expected {kind.__name__}, got {shown(answer)}")


def shown(value: object) -> str:
    """`value`, as a message shows it: at most two hundred characters."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:120]}... ({len(text)} characters)"
