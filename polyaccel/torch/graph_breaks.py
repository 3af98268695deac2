"""Functions that `torch.compile` calls between two graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` for code that may be compiled: it runs as it is, and a graph ends before it.

    `torch.compiler.disable` would load torch's compiler in programs that compile nothing.
    """

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            from polyaccel.torch.run_outside_graph import run_outside_graph

            result: T = run_outside_graph(function, *args, **named)
            return result
        return function(*args, **named)

    return call
