"""The global random generators of Python and numpy: states that are cheap to take where nothing was drawn meanwhile.

A state has 624 words, and both modules take longer to copy it than a small layer takes to run. A mark of a few bytes
shows whether a generator was used since the last copy: both are Mersenne twisters, whose position moves with each draw
and whose words all change when they are used up. The marks are read where CPython and numpy keep these fields; where a
check at import does not find them there, every state is copied.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_WORDS = 624


class HostStates(NamedTuple):
    """States of both generators; None for one that is left alone."""

    python: Any
    numpy: Any

    def restore(self) -> None:
        """Draw from these states on."""
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def present(self) -> HostStates:
        """The present states of those that are not left alone."""
        if self.python is None and self.numpy is None:
            return self
        now = host_states()
        return HostStates(None if self.python is None else now.python, None if self.numpy is None else now.numpy)

    def used_since(self) -> HostStates:
        """Those of the two that were drawn from since these states were taken."""
        now = host_states()
        return HostStates(
            None if now.python is self.python else self.python, None if now.numpy is self.numpy else self.numpy
        )


def host_states() -> HostStates:
    """The present states. A state that did not change is the same object as before."""
    return HostStates(_PYTHON.state(), _NUMPY.state())


class _Generator:
    """One global generator: `copy` takes its state, `mark` a few bytes that change with it; None where none can."""

    def __init__(self, copy: Callable[[], Any], mark: Callable[[], Any], same: Callable[[Any, Any], bool]) -> None:
        self._copy, self._mark, self._same = copy, mark, same
        self._last: tuple[Any, Any] = None, None

    def state(self) -> Any:
        mark, (last_mark, last) = self._mark(), self._last
        if mark is not None and mark == last_mark:
            return last
        state = self._copy()
        if mark is None and last is not None and self._same(state, last):
            return last
        self._last = mark, state
        return state


# Python's generator: {object; int index; uint32 state[624]}, and a second gaussian as an attribute.


def _python_index() -> int:
    return id(_instance()) + object.__basicsize__


def _instance() -> Any:
    return random.seed.__self__  # type: ignore[attr-defined]


def _python_mark() -> Any:
    instance = _instance()
    return ctypes.string_at(_python_index(), 12), instance.gauss_next


def _is_python_readable() -> bool:
    if sys.implementation.name != "cpython" or type(_instance()).__basicsize__ < object.__basicsize__ + 4 * (
        _WORDS + 1
    ):
        return False
    words = np.frombuffer(ctypes.string_at(_python_index(), 4 * (_WORDS + 1)), dtype=np.uint32).tolist()
    _, (*state, index), _ = random.getstate()
    return bool(words == [index, *state])


# numpy's generator: its bit generator is {uint32 key[624]; int position}, and has an interface of C. The second
# gaussian of its older methods is elsewhere: it is used up without a draw, so a state that has one cannot be marked.


def _numpy_copy() -> Any:
    return np.random.get_state(legacy=False)


def _numpy_mark() -> Any:
    generator = _numpy_bits()
    if type(generator) is not np.random.MT19937:
        return None
    at = generator.ctypes.state_address
    last = _NUMPY._last[1]
    if last is not None and last["has_gauss"]:
        return None
    return at, ctypes.string_at(at, 8), ctypes.string_at(at + 4 * _WORDS, 4)


def _numpy_bits() -> Any:
    return np.random.mtrand._rand._bit_generator


def _is_numpy_readable() -> bool:
    try:
        generator = _numpy_bits()
        at = generator.ctypes.state_address
    except AttributeError:
        return False
    if type(generator) is not np.random.MT19937:
        return False
    words = np.frombuffer(ctypes.string_at(at, 4 * (_WORDS + 1)), dtype=np.uint32).tolist()
    state = _numpy_copy()["state"]
    return bool(words == [*state["key"].tolist(), int(state["pos"])])


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(
        one["bit_generator"] == other["bit_generator"]
        and one["has_gauss"] == other["has_gauss"]
        and one["gauss"] == other["gauss"]
        and _same_tree(one["state"], other["state"])
    )


def _same_tree(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_tree(value, other[key]) for key, value in one.items())
    return bool(np.array_equal(one, other))


def _unmarked() -> Any:
    return None


_PYTHON = _Generator(
    random.getstate, _python_mark if _is_python_readable() else _unmarked, lambda one, other: bool(one == other)
)
_NUMPY = _Generator(_numpy_copy, _numpy_mark if _is_numpy_readable() else _unmarked, _same_numpy)
