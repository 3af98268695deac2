"""Runs a script with one line of one module changed: `mutated.py MODULE LINE REPLACEMENT SCRIPT ARGUMENTS...`.

For tests that show whether tests notice what is missing.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


class _Changed(SourceFileLoader):
    """The source of a module with `old` replaced by `new`."""

    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self._old, self._new = old, new

    def get_code(self, fullname: str) -> Any:
        source = self.get_data(self.path).decode()
        if source.count(self._old) != 1:
            raise ValueError(f"{self.path} has {source.count(self._old)} times {self._old!r}")
        return compile(source.replace(self._old, self._new), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, module: str, old: str, new: str) -> None:
        self._module, self._old, self._new = module, old, new

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self._module else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Changed(name, spec.origin, self._old, self._new)
        return spec


if __name__ == "__main__":
    _, module, old, new, script, *arguments = sys.argv
    sys.meta_path.insert(0, _Finder(module, old, new))
    sys.argv = [script, *arguments]
    sys.path.insert(0, script.rpartition("/")[0])
    runpy.run_path(script, run_name="__main__")
