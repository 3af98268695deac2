"""The functions that read the files of other tools, by the name of their format."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path

from polyaccel.checkpoint.convert.importing import Incoming
from polyaccel.errors import CheckpointError

GROUP = "polyaccel.importers"
"""Entry points of packages that read more formats: functions from a path to an `Incoming`."""
_BUILT_IN = {
    "safetensors": "safetensors",
    "bin": "torch_bin",
    "dcp": "torch_dcp",
    "orbax": "orbax",
    "flax": "flax_msgpack",
}


def find_importer(name: str) -> Callable[[Path], Incoming]:
    """Return the function that reads a format. Raises CheckpointError with the names there are."""
    if name in _BUILT_IN:
        module = import_module(f"polyaccel.checkpoint.convert.formats.{_BUILT_IN[name]}")
        built_in: Callable[[Path], Incoming] = module.read
        return built_in
    points = metadata.entry_points(group=GROUP)
    for point in points:
        if point.name == name:
            loaded: Callable[[Path], Incoming] = point.load()
            return loaded
    known = ", ".join([*_BUILT_IN, *sorted(point.name for point in points)])
    hint = "pip install ./plugins/polyaccel-deepspeed" if name == "deepspeed" else "install the package that reads it"
    raise CheckpointError(f"no importer is called {name!r}: expected one of {known}", hint=hint, value=name)
