"""What DeepSpeed has and polyaccel has not: names that can be imported, and raise when they are used.

A script may import `DualPipeVModule` only to ask `isinstance(model, DualPipeVModule)`, whose answer is False here. So
an absent class is a class that has no instances, and an absent function is one that always raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyaccel import PolyaccelError


class NotAvailable(PolyaccelError, NotImplementedError):
    """A name of DeepSpeed's that polyaccel has not."""


def refusal(name: str, why: str) -> NotAvailable:
    """The error of using the absent `name`; `why` is a clause on what there is or is not."""
    return NotAvailable(
        f"{name} does not exist in polyaccel: {why}", hint="see docs/compatibility.md for what there is", value=name
    )


def absent_class(name: str, why: str) -> type:
    """A class called as the last part of `name`, which can be neither instantiated nor subclassed."""

    def make(cls: type, *args: Any, **named: Any) -> Any:
        raise refusal(name, why)

    def inherit(cls: type, /, **named: Any) -> None:
        raise refusal(name, why)

    module, _, last = name.rpartition(".")
    body = {"__new__": make, "__init_subclass__": classmethod(inherit), "__module__": module, "__doc__": why}
    return type(last, (), body)


def absent_function(name: str, why: str) -> Callable[..., Any]:
    """A function called as the last part of `name`, which raises."""

    def function(*args: Any, **named: Any) -> Any:
        raise refusal(name, why)

    function.__module__, _, function.__name__ = name.rpartition(".")
    function.__qualname__, function.__doc__ = function.__name__, why
    return function
