"""Modules of an example, which import each other by bare names because scripts run from their own folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

EXAMPLES = Path(__file__).parents[3] / "examples"


@contextmanager
def example_modules(example: str) -> Iterator[SimpleNamespace]:
    """All modules of `examples/<example>` as attributes. Their names are free again afterwards."""
    folder = EXAMPLES / example
    names = [file.stem for file in folder.glob("*.py")]
    sys.path.insert(0, str(folder))
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
