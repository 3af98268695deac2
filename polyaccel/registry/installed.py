"""The plugins that are installed, by their metadata: nothing is imported."""

from __future__ import annotations

import difflib
import importlib
import logging
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import TypeAlias

from polyaccel.errors import PluginConflict, PluginNotFound

_log = logging.getLogger(__name__)
_OURS = __name__.partition(".")[0]


class PluginGroup(Enum):
    """The kinds of plugins. The value is the entry-point group."""

    ACCELERATORS = "polyaccel.accelerators"
    COMM = "polyaccel.comm"
    TIERS = "polyaccel.tiers"
    STORAGE = "polyaccel.storage"
    LAUNCHERS = "polyaccel.launchers"
    MONITORS = "polyaccel.monitors"

    @property
    def noun(self) -> str:
        """The word for one plugin of the group in messages."""
        return _NOUNS[self]


_NOUNS = {
    PluginGroup.ACCELERATORS: "accelerator",
    PluginGroup.COMM: "comm backend",
    PluginGroup.TIERS: "tier",
    PluginGroup.STORAGE: "storage",
    PluginGroup.LAUNCHERS: "launcher",
    PluginGroup.MONITORS: "monitor",
}


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """An installed plugin as its metadata describes it: entry point `name = value` of `package` at `version`."""

    group: PluginGroup
    name: str
    value: str
    package: str
    version: str

    @property
    def source(self) -> str:
        """The package and its version, as every message writes them."""
        return f"{self.package} {self.version}"

    def __str__(self) -> str:
        return f"{self.group.noun} {self.name!r} (package {self.source})"


Listed: TypeAlias = tuple[PluginInfo, metadata.EntryPoint]


def list_plugins(group: PluginGroup) -> tuple[PluginInfo, ...]:
    """Every installed plugin of `group`, sorted by name; a name that is offered twice stands twice."""
    return tuple(info for info, _ in listed(group))


def find_plugin(group: PluginGroup, name: str) -> PluginInfo:
    """Find the one plugin `name` without importing it. Raises PluginNotFound, PluginConflict."""
    return find(group, name)[0]


def listed(group: PluginGroup) -> list[Listed]:
    """Every plugin of `group` with its entry point, sorted."""
    pairs = {}
    for entry_point in _entry_points(group.value):
        package, version = _origin(entry_point)
        pairs[PluginInfo(group, entry_point.name, entry_point.value, package, version)] = entry_point
    return sorted(pairs.items(), key=lambda pair: (pair[0].name, pair[0].package, pair[0].value))


def _entry_points(group: str) -> list[metadata.EntryPoint]:
    try:
        return list(metadata.entry_points(group=group))
    except Exception:  # one malformed entry_points.txt, of any package, fails the whole call
        return list(_entry_points_one_by_one(group))


def _entry_points_one_by_one(group: str) -> Iterator[metadata.EntryPoint]:
    """The entry points of every distribution that can be read; the first on the path hides later ones of its name."""
    seen = set()
    for distribution in metadata.distributions():
        try:
            name = distribution.metadata["Name"]
            if name not in seen:
                seen.add(name)
                yield from distribution.entry_points.select(group=group)
        except Exception as error:
            where = getattr(distribution, "_path", distribution)
            _log.warning("plugins of %s are left out, its metadata cannot be read: %s", where, summary(error))


def _origin(entry_point: metadata.EntryPoint) -> tuple[str, str]:
    """Package and version of an entry point, as far as its metadata can be read."""
    distribution = entry_point.dist
    try:
        if distribution is not None and distribution.name:
            return distribution.name, distribution.version
    except Exception:  # METADATA is missing or damaged, entry_points.txt next to it is not
        _log.debug("unreadable metadata of %s", distribution, exc_info=True)
    return str(getattr(distribution, "_path", "unknown package")), "of unknown version"


def find(group: PluginGroup, name: str) -> Listed:
    """`find_plugin` with the entry point."""
    found = [pair for pair in listed(group) if pair[0].name == name]
    if not found:
        # It may have been installed since this process looked, within the resolution of a directory's time.
        importlib.invalidate_caches()
        metadata.MetadataPathFinder().invalidate_caches()  # before Python 3.13 the call above leaves this cache alone
        found = [pair for pair in listed(group) if pair[0].name == name]
    if not found:
        raise _not_found(group, name)
    return only(found)


def only(found: Sequence[Listed]) -> Listed:
    """The one of `found`, plugins of one name. Raises PluginConflict where there are more."""
    if len(found) == 1:
        return found[0]
    infos = [info for info, _ in found]
    offers = " and ".join(f"{info.value} of {info.source}" for info in infos)
    others = [package for package in dict.fromkeys(info.package for info in infos) if package != _OURS]
    raise PluginConflict(
        f"{infos[0].group.noun} {infos[0].name!r} is offered more than once: {offers}",
        hint=f"keep one: pip uninstall {' or '.join(others)}" if others else f"install {_OURS} again",
        value=infos[0].name,
    )


def _not_found(group: PluginGroup, name: str) -> PluginNotFound:
    installed = list_plugins(group)
    names = ", ".join(f"{info.name} ({info.source})" for info in installed) or "none"
    lower = {info.name.lower(): info.name for info in installed}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"did you mean {lower[close[0]]!r}? Otherwise " if close else ""
    return PluginNotFound(
        f"no {group.noun} plugin is called {name!r}; installed: {names}",
        hint=f"{hint}install the package that provides it (entry-point group {group.value!r})",
        value=name,
    )


def summary(error: BaseException) -> str:
    """Type and message of `error` on one line."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    return next((line for line in lines if line and not line.startswith(" ")), type(error).__name__)
