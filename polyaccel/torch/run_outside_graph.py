"""Calls that `torch.compile` leaves out of its graphs. Imported while a graph is traced: it loads torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_outside_graph(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call `function` as it is, between two graphs."""
    return function(*args, **named)
