"""The exception tree. Every error has the value that was wrong and a hint that says what to do.

A user's mistake is one of these, never an assert; an `InvariantError` is a bug of polyaccel.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyaccel.redaction import HIDDEN, is_secret


class PolyaccelError(Exception):
    """Base of everything polyaccel raises on purpose.

    Args:
        message: What failed: `<what failed>: <value>`, lower case, without a full stop.
        hint: What to do about it, beginning with an imperative; "" without one.
        value: The offending value, as the user wrote it; None without one.
    """

    def __init__(self, message: str, *, hint: str = "", value: object = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.value = value

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a pool of processes hand it on. Values that cannot be pickled arrive as their texts."""
        state = {name: _portable(value) for name, value in self.__dict__.items()}
        return _restored, (type(self), self.args, state)


def _restored(kind: type[PolyaccelError], args: tuple[Any, ...], state: dict[str, Any]) -> PolyaccelError:
    # The first of several built-in bases need not be the one that lays out the object; an OSError among them is.
    base = OSError if issubclass(kind, OSError) else Exception
    error = base.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _portable(value: object) -> object:
    """`value`, or its text where it cannot be pickled; in a list or tuple, that of each such part."""
    try:
        pickle.dumps(value)
    except Exception:  # what a value's own __reduce__ raises can be anything
        if isinstance(value, list | tuple):
            return [*map(_portable, value)] if isinstance(value, list) else (*map(_portable, value),)
        return replace(value, value=_written(value.value)) if isinstance(value, Problem) else _written(value)
    return value


_MOST_SHOWN = 100
"""Problems that the message of a `ConfigError` shows; `problems` has all of them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a config.

    Attributes:
        key: Dotted key.
        value: Value that the user wrote. Messages hide a secret one.
        expected: What was expected, as a clause.
        hint: What to do about it, beginning with an imperative; "" without one.
    """

    key: str
    value: object
    expected: str
    hint: str = ""

    def __str__(self) -> str:
        hides = is_secret(self.key) and isinstance(self.value, str | bytes)
        head = f"{self.key} = {HIDDEN if hides else _shown(self.value)}: {self.expected}"
        return f"{head}\n    hint: {self.hint}" if self.hint else head


def _shown(value: object) -> str:
    """`value` as the JSON that a config has, on a line of some 200 characters at most."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = _written(value)
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text)} characters)"


def _written(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; a value inside itself
        return f"<{type(value).__name__}: {error}>"


class ConfigError(PolyaccelError, ValueError):
    """A config that cannot be used. Lists every problem found, not only the first.

    Args:
        problems: All problems.
        source: Where the config was read, for the message.
    """

    def __init__(self, problems: Sequence[Problem], *, source: str = "config") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        lines = "".join(f"\n  {problem}" for problem in self.problems[:_MOST_SHOWN])
        if len(self.problems) > _MOST_SHOWN:
            lines += f"\n  and {len(self.problems) - _MOST_SHOWN} more"
        super().__init__(f"{source}: {count}{lines}", value=[problem.value for problem in self.problems])


class PluginNotFound(PolyaccelError, LookupError):
    """No installed plugin has this name, or none of those installed can run here."""


class PluginConflict(PolyaccelError):
    """Two distributions offer the same plugin name."""


class PluginContractError(PolyaccelError, TypeError):
    """A plugin that cannot be loaded, or does not implement the contract of its entry-point group."""


class ShardingError(PolyaccelError, ValueError):
    """Parameters cannot be laid out or updated as asked. The message names the parameter."""


class CommError(PolyaccelError, RuntimeError):
    """A collective failed, or ranks called different ones.

    Args:
        message: See `PolyaccelError`.
        missing_ranks: Global ranks known not to have taken part.
        hint: See `PolyaccelError`.
        value: See `PolyaccelError`. None stands for `missing_ranks`, if there are any.
    """

    def __init__(
        self, message: str, *, missing_ranks: Sequence[int] = (), hint: str = "", value: object = None
    ) -> None:
        self.missing_ranks = tuple(missing_ranks)
        super().__init__(message, hint=hint, value=self.missing_ranks or None if value is None else value)


class CommTimeout(CommError, TimeoutError):
    """A collective did not finish in time. Names the operation, its sequence number and the missing ranks."""


class HostsDifferError(CommError):
    """A backend cannot reach all of these ranks, and every one of them has detected that; another backend may."""


class LossScaleError(PolyaccelError, ArithmeticError):
    """Gradients are not finite step after step, under fp16 at the smallest loss scale. Names the first parameter that
    is not finite."""


class VerificationError(PolyaccelError, ArithmeticError):
    """A rewrite computes other numbers than plain torch. Names the rewrite, the first parameter and both numbers."""


class CheckpointError(PolyaccelError, OSError):
    """A checkpoint cannot be written, or is missing, incomplete or damaged. Names the file."""


class OffloadError(PolyaccelError, OSError):
    """States cannot be kept off the device: no room, or a file that cannot be read or written. Names the file."""


class LaunchError(PolyaccelError, RuntimeError):
    """Ranks could not be started, or a rank failed. Names the rank."""


class InvariantError(PolyaccelError, AssertionError):
    """A bug of polyaccel or of a plugin: an impossible state. Please report it with the values shown."""
