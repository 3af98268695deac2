"""Which Python modules are those of libraries, whose state is not a region's."""

from __future__ import annotations

import sys
from typing import Any

LIBRARIES = frozenset({"torch", "numpy", "polyaccel", "transformers", "jax"}) | sys.stdlib_module_names
"""Objects of their classes are not looked into, nor are their functions."""


def is_of_library(module: Any) -> bool:
    """Whether a Python module's name is that of a library."""
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES
