"""The plugins that are installed, and the loading of exactly one of them.

A plugin is an entry point in one of six groups; its name is the string that configs and environment variables use, and
its value names a class that implements the group's ABC. Listing reads the metadata of installed distributions and
imports nothing. Loading imports one class and checks what it promises. Probing asks whether it could run here, within a
limit. Every error names the package and its version. No ABC is imported here: the caller passes the one to check
against.
"""

from polyaccel.registry.installed import PluginGroup, PluginInfo, find_plugin, list_plugins
from polyaccel.registry.loading import load_plugin
from polyaccel.registry.probing import PATIENCE_S, PROBE_LIMIT_S, PluginStatus, probe_all, probe_plugin

__all__ = [
    "PATIENCE_S",
    "PROBE_LIMIT_S",
    "PluginGroup",
    "PluginInfo",
    "PluginStatus",
    "find_plugin",
    "list_plugins",
    "load_plugin",
    "probe_all",
    "probe_plugin",
]
