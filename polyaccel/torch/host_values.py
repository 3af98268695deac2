"""Tensors that have values while others have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def host_values() -> Iterator[None]:
    """Inside (or in a function that this decorates) no mode of torch's sees what is computed: what the host decides by
    has values also in a pass of tensors without any (`polyaccel plan`)."""
    with torch._C._DisableTorchDispatch():
        yield
