"""What a checkpoint records of the run that saved it, for people and for later versions: nothing is loaded by it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.mesh import Mesh
from polyaccel.errors import PolyaccelError
from polyaccel.registry import PluginGroup, find_plugin

_PACKAGES = ("polyaccel", "torch", "jax", "numpy", "safetensors", "transformers")


def run_metadata(config: Mapping[str, Any], storage: str, accelerator: Accelerator, mesh: Mesh) -> dict[str, Any]:
    """Return versions, plugins, mesh and `config` as plain values; `storage` is the plugin's name."""
    return {
        "packages": {name: version for name in _PACKAGES if (version := _version(name))} | {"python": _python()},
        "plugins": {
            "accelerator": _source(PluginGroup.ACCELERATORS, accelerator.name),
            "storage": _source(PluginGroup.STORAGE, storage),
        },
        "mesh": {axis.name: axis.size for axis in mesh.axes},
        "config": dict(config),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def _source(group: PluginGroup, name: str) -> str:
    """A plugin's name, package and version; its name alone where it is not an installed one."""
    try:
        return f"{name} ({find_plugin(group, name).source})"
    except PolyaccelError:
        return name
