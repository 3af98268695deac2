"""The choice of the comm backend: by name, or the one that fits where none is named."""

from __future__ import annotations

import logging

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import API_VERSION, CommBackend, Rendezvous
from polyaccel.errors import PluginNotFound
from polyaccel.registry import PluginGroup, load_plugin

WITHIN_HOST = "shm"
"""The backend that joins the ranks of one host where it can."""
_TORCH = "gloo"
"""The plugin that also stands for what other packages teach torch."""
_log = logging.getLogger(__name__)


def comm_backend(name: str) -> type[CommBackend]:
    """Return the backend `name`: a plugin, else one registered with torch.distributed."""
    try:
        plugin: type[CommBackend] = load_plugin(PluginGroup.COMM, name, CommBackend, API_VERSION)
    except PluginNotFound:
        torch_plugin: type[CommBackend] = load_plugin(PluginGroup.COMM, _TORCH, CommBackend, API_VERSION)
        found = torch_plugin.named(name)
        if found is None:
            raise
        return found
    return plugin


def default_backend(rendezvous: Rendezvous, accelerator: Accelerator) -> str:
    """Return the backend's name: `local` for one process, shared memory on one host if possible, else the device's."""
    if rendezvous.world_size == 1:
        return "local"
    own = accelerator.capabilities().default_comm
    is_one_host = rendezvous.local_world_size == rendezvous.world_size
    if own not in ("gloo", "local") or not is_one_host or not accelerator.works_on_host_memory:
        return own
    near = comm_backend(WITHIN_HOST)
    if near.most_ranks is not None and rendezvous.world_size > near.most_ranks:
        return own
    probe = near.probe()
    if not probe.usable and own == "gloo" and rendezvous.rank == 0:
        _log.info("ranks talk by gloo, several times slower than by shared memory: %s", probe.reason)
    return WITHIN_HOST if probe.usable else own
