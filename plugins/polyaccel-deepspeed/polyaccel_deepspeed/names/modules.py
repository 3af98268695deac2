"""The modules of `deepspeed`, made from the table of names: a finder for `import`, and lazy attributes.

A name is looked up when it is first used, so that `import deepspeed` loads neither torch nor polyaccel's engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from polyaccel_deepspeed.names.entry import Name, Status
from polyaccel_deepspeed.names.surface import MODULES

ROOT = "deepspeed"


class _Made(ModuleType):
    """A module of the table. A name stays that of the table when a module of the same name below is imported, as
    `deepspeed.utils.z3_leaf_module` is both."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_module_below = isinstance(value, _Made) and value.__name__ == f"{self.__name__}.{name}"
        if not (is_module_below and name in MODULES[self.__name__].names):
            super().__setattr__(name, value)


RUNNABLE = {
    "deepspeed.checkpoint.ds_to_universal": "universal",
    "deepspeed.env_report": "report",
    "deepspeed.launcher.launch": "node_launch",
    "deepspeed.launcher.runner": "launch",
    "deepspeed.utils.zero_to_fp32": "zero_to_fp32",
}
"""Modules that `python -m` runs, and the function of `polyaccel_deepspeed.commands` that each calls."""
_MAIN = ".__main__"


class _Finder(MetaPathFinder, Loader):
    """Finds every module of the table below `deepspeed`, and makes it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.endswith(_MAIN) and fullname.removesuffix(_MAIN) in RUNNABLE:
            return ModuleSpec(fullname, self, origin="polyaccel_deepspeed.commands")
        if fullname not in MODULES or fullname == ROOT:
            return None
        spec = ModuleSpec(fullname, self, origin="polyaccel_deepspeed.names.surface", is_package=True)
        spec.submodule_search_locations = []
        return spec

    def get_code(self, fullname: str) -> Any:
        """Return what `python -m` runs of a module."""
        name = RUNNABLE[fullname.removesuffix(_MAIN)]
        text = f"from polyaccel_deepspeed.commands import {name} as run; raise SystemExit(run())"
        return compile(text, fullname, "exec")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Made(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"{MODULES[module.__name__].doc} Made of `polyaccel_deepspeed.names.surface`."
        module.__getattr__, module.__dir__ = accessors(module.__name__)  # type: ignore[method-assign]


def install() -> None:
    """Let `import` find the modules of the table. A second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def accessors(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module of the table."""
    entry = MODULES[module]
    below = {name.removeprefix(f"{module}.") for name in MODULES if name.startswith(f"{module}.")}
    children = {name for name in below if "." not in name}

    def get(name: str) -> Any:
        if name in entry.names:
            value = resolve(module, name, entry.names[name])
            setattr(sys.modules[module], name, value)
            return value
        if name in children:
            return import_module(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def names() -> list[str]:
        there = [name for name, one in entry.names.items() if one.status in (Status.YES, Status.ACCEPTED)]
        return sorted({*vars(sys.modules[module]), *there, *children})

    return get, names


def resolve(module: str, name: str, entry: Name) -> Any:
    """The object that stands for a name of the table."""
    full = f"{module}.{name}"
    if entry.status in (Status.YES, Status.ACCEPTED):
        home, _, attribute = entry.home.partition(":")
        value: Any = import_module(home)
        for part in attribute.split(".") if attribute else ():
            value = getattr(value, part)
        return value
    from polyaccel_deepspeed.names.absent import absent_class, absent_function

    make = absent_class if name[:1].isupper() else absent_function
    return make(full, entry.why)
