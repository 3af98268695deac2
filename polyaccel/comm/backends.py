"""The comm backend of a name: a plugin, else one that some other package gives to torch.distributed."""

from __future__ import annotations

from polyaccel.comm.base import API_VERSION, CommBackend
from polyaccel.comm.torch_pg import out_of_tree_backend
from polyaccel.errors import PluginNotFound
from polyaccel.registry import PluginGroup, load_plugin


def comm_backend(name: str) -> type[CommBackend]:
    """The backend called `name`. Raises as `load_plugin`; PluginNotFound if torch does not know it either."""
    try:
        plugin: type[CommBackend] = load_plugin(PluginGroup.COMM, name, CommBackend, API_VERSION)
    except PluginNotFound:
        found = out_of_tree_backend(name)
        if found is None:
            raise
        return found
    return plugin
