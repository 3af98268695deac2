"""What the built-in monitors share: their options, the libraries that they need, the folders that they write to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyaccel.core.install_line import install_line
from polyaccel.core.types import Probe
from polyaccel.errors import ConfigError, Problem


def checked(name: str, options: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return `options` with every one of `kinds` (None if left out). Raises ConfigError."""
    problems = []
    for option, value in options.items():
        if option not in kinds:
            hint = f"the options are {', '.join(kinds)}"
            problems.append(Problem(f"{name}.{option}", value, "is not an option", hint))
        elif value is not None and type(value) is not kinds[option]:
            problems.append(Problem(f"{name}.{option}", value, f"should be of type {kinds[option].__name__}"))
    if problems:
        raise ConfigError(problems)
    return {option: options.get(option) for option in kinds}


def required(name: str, module: str, extra: str) -> Any:
    """Import the monitor's library `module`; the error names the `extra` that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = Problem(name, module, f"cannot be imported: {error}", install_line(extra))
        raise ConfigError([problem]) from error


def probe_of(package: str, extra: str) -> Probe:
    """Whether `package` is there, without importing it."""
    if find_spec(package) is None:
        return Probe(usable=False, reason=f"the package {package} is not installed: {install_line(extra)}")
    return Probe(usable=True, reason=f"the package {package} is installed")


def made_folder(name: str, folder: Path) -> Path:
    """`folder`, made where it is missing. Raises ConfigError for the monitor `name` where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(name, str(folder), f"cannot be made: {error}", "choose another output_path")
        raise ConfigError([problem]) from error
    return folder


def output_folder(name: str, directory: Path, options: Mapping[str, Any]) -> Path:
    """The folder of `output_path` and `job_name`; without an `output_path`, one called `name` in `directory`."""
    folder = Path(options["output_path"]).absolute() if options.get("output_path") else directory / name
    return made_folder(name, folder / (options.get("job_name") or ""))
