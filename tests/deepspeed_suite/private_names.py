"""DeepSpeed's own modules and names that the drop-in does not have, for the imports at the top of DeepSpeed's tests.

A file of tests would not load for one such name, whatever its tests use. With these each can be imported, and raises
when a test uses it. Only files of DeepSpeed's tests get such names. Other code finds what the drop-in has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT = "deepspeed."
TESTS = "/tests/unit/"


class UsedError(AttributeError):
    """A test uses a name that the drop-in does not have."""


class _Private(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Makes modules below `deepspeed` that no other finder has, for files of DeepSpeed's tests."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(ROOT) or not _is_asked_by_tests():
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Private(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "A module that stands in."


def let_tests_import() -> None:
    """Let DeepSpeed's tests import what the drop-in does not have."""
    import deepspeed  # noqa: F401, puts its own finder before this one
    import polyaccel_deepspeed.names.modules as modules

    sys.meta_path.append(_Finder())
    modules._Made.__getattr__ = _missing  # type: ignore[attr-defined]


def _missing(module: ModuleType, name: str) -> Any:
    if name.startswith("__") or not _is_asked_by_tests():
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    return _stand_in(f"{module.__name__}.{name}")


def _is_asked_by_tests() -> bool:
    """Tell whether the code that imports is a file of DeepSpeed's tests."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            return TESTS in file
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Refusing(type):
    """The class of stand-ins, none of which has attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsedError(f"{cls.__module__}.{cls.__name__}.{name}")


def _stand_in(full: str) -> type[Exception]:
    """Make a class that has no instances; tests name some in `pytest.raises`."""

    def refuse(cls: type, *args: Any, **named: Any) -> Any:
        raise UsedError(full)

    module, _, name = full.rpartition(".")
    return _Refusing(name, (Exception,), {"__new__": refuse, "__module__": module})
