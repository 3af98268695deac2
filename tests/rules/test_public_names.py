"""The names that users may rely on are frozen, and each says what it is.

After a deliberate change: `python tests/rules/test_public_names.py` writes the list anew.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "public_names.json"
MODULES = (
    "polyaccel",
    "polyaccel.accelerators",
    "polyaccel.checkpoint",
    "polyaccel.checkpointing",
    "polyaccel.comm",
    "polyaccel.config",
    "polyaccel.data",
    "polyaccel.utils",
    "polyaccel.zero",
)


def public_names(module: ModuleType) -> list[str]:
    """`__all__`, or what the module's file imports in order to offer it."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    )


@pytest.mark.parametrize("name", MODULES)
def test_the_names_are_the_frozen_ones(name: str) -> None:
    assert public_names(import_module(name)) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", MODULES)
def test_each_name_is_there_and_is_documented(name: str) -> None:
    module = import_module(name)
    values = {public: getattr(module, public) for public in public_names(module)}
    ours = {
        public: value
        for public, value in values.items()
        if isinstance(value, ModuleType)
        or (callable(value) and getattr(value, "__module__", "").startswith("polyaccel"))
    }
    assert {public for public, value in ours.items() if not inspect.getdoc(value)} == set()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: public_names(import_module(name)) for name in MODULES}, indent=1) + "\n")
