"""Tensors that have values while others have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def host_values() -> Iterator[None]:
    """Hide inside computations from torch's modes: decisions of the host need values even in fake passes."""
    with torch._C._DisableTorchDispatch():
        yield
