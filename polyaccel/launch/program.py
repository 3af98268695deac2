"""What every rank executes: a Python script or module with its arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from polyaccel.errors import LaunchError


def python_command(target: str, arguments: Sequence[str] = (), *, module: bool = False) -> tuple[str, ...]:
    """The command line that runs `target`, a script (or, with `module`, a module's dotted name), with this Python.

    Raises LaunchError when there is no such script or module: better once here than once a rank.
    """
    if module:
        _check_module(target)
        return (sys.executable, "-m", target, *arguments)
    if not Path(target).exists():
        cure = (
            "give the path of a Python file; options of `polyaccel run` stand before it, those of the script after it"
        )
        if _has_module(target):
            cure = f"to run the module of that name: polyaccel run --module {target}"
        raise LaunchError(f"no script {target!r} in {os.getcwd()}", cure=cure, value=target)
    return (sys.executable, target, *arguments)


def _check_module(name: str) -> None:
    if name.endswith(".py") or os.sep in name:
        cure = f"leave out --module, or write the dotted name: {Path(name).stem}"
        raise LaunchError(f"--module takes a module's name, and {name!r} is a path", cure=cure, value=name)
    if not _has_module(name):
        cure = "install the package, or start from the directory that it is in"
        raise LaunchError(f"no module {name!r} in {os.getcwd()} or on sys.path", cure=cure, value=name)


def _has_module(name: str) -> bool:
    """Whether the top package of `name` is there. Looks no deeper: to find a submodule is to run its package."""
    top = name.partition(".")[0]
    return bool(top) and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None
