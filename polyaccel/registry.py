"""The plugins that are installed, and the loading of exactly one of them.

A plugin is an entry point in one of six groups; its name is the string that configs and environment variables use, and
its value names a class that implements the group's ABC. Listing reads the metadata of installed distributions and
imports nothing. Loading imports one class and checks what it promises. Every error names the package and its version.

This is the only module that imports stevedore. It knows no ABC: the caller passes the one to check against.

[Note: Fresh entry points]
Stevedore answers from a cache on disk whose key packs modification times as 32-bit floats, which step by 128 s
nowadays: a plugin that was installed again soon after keeps its old entry points, for good. It also drops the
distribution of every entry point. So stevedore gets its entry points from here: `_manager_class` overrides the one
method through which it would ask its cache, and hands it the single entry point that importlib.metadata, asked anew
each time, has for the name. "Not found" and "offered twice" are decided here, before stevedore is asked at all.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import Any, TypeAlias

from polyaccel.errors import InvariantError, PluginConflict, PluginContractError, PluginNotFound, PolyaccelError
from polyaccel.types import Probe

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


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """The result of loading and probing one plugin.

    `usable`, `reason` and `priority` are those of its `probe()`. When the plugin is broken `error` says how, `reason`
    is its message, and `traceback` that of what the plugin raised ("" when it raised nothing).
    """

    info: PluginInfo
    usable: bool
    reason: str
    priority: int = 0
    plugin: type[Any] | None = None
    api_version: tuple[int, int] | None = None
    error: PolyaccelError | None = None
    traceback: str = ""


_Listed: TypeAlias = tuple[PluginInfo, metadata.EntryPoint]


def list_plugins(group: PluginGroup) -> tuple[PluginInfo, ...]:
    """Every installed plugin of `group`, sorted by name. Imports none; a name that is offered twice stands twice."""
    return tuple(info for info, _ in _listed(group))


def find_plugin(group: PluginGroup, name: str) -> PluginInfo:
    """The one plugin called `name`, without importing it.

    Raises PluginNotFound when nothing installed has the name, PluginConflict when more than one distribution has it.
    """
    return _find(group, name)[0]


def load_plugin(group: PluginGroup, name: str, base: type[Any], api_version: tuple[int, int]) -> type[Any]:
    """Import the one plugin called `name`: a concrete subclass of `base`, written for a compatible `api_version`.

    Compatible means the same major number and a minor number that is not newer. Raises PluginNotFound, PluginConflict,
    or PluginContractError, whose `__cause__` is what the plugin itself raised.
    """
    return _load(*_find(group, name), base, api_version)


def probe_all(group: PluginGroup, base: type[Any], api_version: tuple[int, int]) -> tuple[PluginStatus, ...]:
    """Load and probe every plugin of `group`. A broken one is a row with its traceback; only Ctrl-C is raised."""
    listed = _listed(group)
    return tuple(
        _probe([pair for pair in listed if pair[0].name == info.name], info, base, api_version) for info, _ in listed
    )


# Listing: metadata only.


def _listed(group: PluginGroup) -> list[_Listed]:
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
            _log.warning("plugins of %s are left out, its metadata cannot be read: %s", where, _summary(error))


def _origin(entry_point: metadata.EntryPoint) -> tuple[str, str]:
    """Package and version of an entry point, as far as its metadata can be read."""
    distribution = entry_point.dist
    try:
        if distribution is not None and distribution.name:
            return distribution.name, distribution.version
    except Exception:  # METADATA is missing or damaged, entry_points.txt beside it is not
        _log.debug("unreadable metadata of %s", distribution, exc_info=True)
    return str(getattr(distribution, "_path", "unknown package")), "of unknown version"


def _find(group: PluginGroup, name: str) -> _Listed:
    found = [pair for pair in _listed(group) if pair[0].name == name]
    if not found:
        # It may have been installed since this process looked, within the resolution of a directory's time.
        importlib.invalidate_caches()
        metadata.MetadataPathFinder().invalidate_caches()  # before Python 3.13 the call above leaves this cache alone
        found = [pair for pair in _listed(group) if pair[0].name == name]
    if not found:
        raise _not_found(group, name)
    return _only(found)


def _only(found: Sequence[_Listed]) -> _Listed:
    if len(found) == 1:
        return found[0]
    infos = [info for info, _ in found]
    offers = " and ".join(f"{info.value} of {info.source}" for info in infos)
    others = [package for package in dict.fromkeys(info.package for info in infos) if package != _OURS]
    raise PluginConflict(
        f"{infos[0].group.noun} {infos[0].name!r} is offered more than once: {offers}",
        cure=f"keep one: pip uninstall {' or '.join(others)}" if others else f"install {_OURS} again",
        value=infos[0].name,
    )


def _not_found(group: PluginGroup, name: str) -> PluginNotFound:
    installed = list_plugins(group)
    names = ", ".join(f"{info.name} ({info.source})" for info in installed) or "none"
    close = difflib.get_close_matches(name, [info.name for info in installed], n=1)
    hint = f"did you mean {close[0]!r}? Otherwise " if close else ""
    return PluginNotFound(
        f"no {group.noun} plugin is called {name!r}; installed: {names}",
        cure=f"{hint}install the package that provides it (entry-point group {group.value!r})",
        value=name,
    )


# Loading: one class is imported, then checked.


def _load(info: PluginInfo, entry_point: metadata.EntryPoint, base: type[Any], ours: tuple[int, int]) -> type[Any]:
    plugin = _check_class(info, _import(info, entry_point), base)
    _check_api(info, plugin, base, ours)
    return plugin


def _import(info: PluginInfo, entry_point: metadata.EntryPoint) -> Any:
    manager = _manager_class(entry_point)
    try:
        extensions = manager(info.group.value, info.name, invoke_on_load=False).extensions
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and the panics of native modules are no Exception
        raise PluginContractError(
            f"{info} cannot be imported from {info.value!r}: {_summary(error)}",
            cure=f"repair or uninstall {info.package}; `polyaccel doctor -v` shows the traceback",
            value=info.value,
        ) from error
    if len(extensions) != 1 or extensions[0].entry_point is not entry_point:
        raise InvariantError(f"stevedore loaded {extensions} when asked for {info}", value=extensions)
    return extensions[0].plugin  # not `.driver`, which mistakes an object that is falsy for a missing one


def _manager_class(entry_point: metadata.EntryPoint) -> Any:
    """Stevedore's manager of one plugin, restricted to `entry_point` [Note: Fresh entry points]."""
    try:
        from stevedore import driver  # here and not above: `polyaccel doctor` runs without it too
    except ImportError as error:
        raise PluginContractError(
            f"no plugin can be loaded without stevedore: {_summary(error)}", cure="pip install 'stevedore>=5.10'"
        ) from error

    class FreshDriverManager(driver.DriverManager):  # type: ignore[type-arg]
        def list_entry_points(self) -> list[metadata.EntryPoint]:
            return [entry_point]

    return FreshDriverManager


def _check_class(info: PluginInfo, plugin: Any, base: type[Any]) -> type[Any]:
    wanted = f"{base.__module__}.{base.__qualname__}"
    if not isinstance(plugin, type):
        raise PluginContractError(
            f"{info}: {info.value!r} is not a class but a {type(plugin).__name__}",
            cure=f"let the entry point name a subclass of {wanted}",
            value=plugin,
        )
    if base not in plugin.__mro__:  # a class registered with the ABC passes issubclass but inherits no defaults
        raise PluginContractError(
            f"{info}: {info.value!r} is not a subclass of {wanted}",
            cure=f"derive it from {wanted}, or move the entry point to the group that it belongs to",
            value=plugin,
        )
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        raise PluginContractError(
            f"{info}: {info.value!r} lacks {len(missing)} of the methods of {wanted}: {', '.join(missing)}",
            cure=f"implement them, or install a version of {info.package} that does",
            value=plugin,
        )
    return plugin


def _check_api(info: PluginInfo, plugin: type[Any], base: type[Any], ours: tuple[int, int]) -> None:
    stated = _stated_api(plugin, base)
    if stated is None:
        raise PluginContractError(
            f"{info}: {info.value!r} does not state the API version that it was written for",
            cure=f"write `API_VERSION = {ours}` in the class, as a literal: the one it inherits would always agree",
            value=plugin,
        )
    if not isinstance(stated, tuple) or [type(part) for part in stated] != [int, int]:
        raise PluginContractError(
            f"{info}: API_VERSION = {stated!r} is not a pair of integers",
            cure=f"write `API_VERSION = {ours}`",
            value=stated,
        )
    if stated[0] != ours[0] or stated[1] > ours[1]:
        newer = stated > ours
        raise PluginContractError(
            f"{info} was written for version {stated[0]}.{stated[1]} of the {info.group.noun} API; "
            f"this {_OURS} has {ours[0]}.{ours[1]}",
            cure=f"upgrade {_OURS}, or install an older {info.package}" if newer else f"upgrade {info.package}",
            value=stated,
        )


def _stated_api(plugin: type[Any], base: type[Any]) -> Any:
    """The API_VERSION of the plugin's own classes; None when it only inherits one from the contract's package.

    Plugins of that package are released together with the contract: what they inherit is right.
    """
    is_released_together = _top_package(plugin) == _top_package(base)
    for cls in plugin.__mro__:
        if "API_VERSION" in vars(cls) and (is_released_together or _top_package(cls) != _top_package(base)):
            return vars(cls)["API_VERSION"]
    return None


def _probe(found: Sequence[_Listed], info: PluginInfo, base: type[Any], ours: tuple[int, int]) -> PluginStatus:
    try:
        plugin = _load(*_only(found), base, ours)
    except PolyaccelError as refusal:
        return _broken(info, None, refusal, refusal.__cause__)
    try:
        probe = plugin.probe()
        if not isinstance(probe, Probe):
            raise TypeError(f"probe() returned {probe!r}, not a {Probe.__module__}.{Probe.__name__}")
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        error = PluginContractError(
            f"{info} failed while it was probed: {_summary(cause)}",
            cure=f"a probe says why not instead of raising: report it to the authors of {info.package}",
            value=info.value,
        )
        return _broken(info, plugin, error, cause)
    return PluginStatus(info, probe.usable, probe.reason, probe.priority, plugin, _stated_api(plugin, base))


def _broken(
    info: PluginInfo, plugin: type[Any] | None, error: PolyaccelError, cause: BaseException | None
) -> PluginStatus:
    trace = "" if cause is None else _own_traceback(cause)
    return PluginStatus(info, usable=False, reason=error.message, plugin=plugin, error=error, traceback=trace)


def _own_traceback(cause: BaseException) -> str:
    """The traceback of `cause` from the first frame that is neither the import system's, stevedore's nor ours."""
    frames = cause.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(cause), cause, frames))


def _summary(error: BaseException) -> str:
    """Type and message of `error` on one line."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    return next((line for line in lines if line and not line.startswith(" ")), type(error).__name__)


def _is_machinery(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return filename == __file__ or path.startswith("<frozen ") or "/importlib/" in path or "/stevedore/" in path


def _top_package(cls: type[Any]) -> str:
    return cls.__module__.partition(".")[0]
