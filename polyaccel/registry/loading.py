"""Loading one plugin: its class is imported, then checked. This is the only module that imports stevedore.

[Note: Entry point cache]
Stevedore answers from a cache on disk whose key packs modification times as 32-bit floats, which step by 128 s
nowadays: a plugin that was installed again soon after keeps its old entry points, for good. It also drops the
distribution of every entry point. So stevedore gets its entry points from here: `_manager_class` overrides the one
method through which it would ask its cache, and hands it the single entry point that importlib.metadata, asked again
each time, has for the name. "Not found" and "offered twice" are decided here, before stevedore is asked at all.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from polyaccel.errors import InvariantError, PluginContractError
from polyaccel.registry.installed import PluginGroup, PluginInfo, find, summary

_OURS = __name__.partition(".")[0]


def load_plugin(group: PluginGroup, name: str, base: type[Any], api_version: tuple[int, int]) -> type[Any]:
    """Import the one plugin called `name`: a concrete subclass of `base`, written for a compatible `api_version`.

    Compatible means the same major number and a minor number that is not newer. Raises PluginNotFound, PluginConflict,
    or PluginContractError, whose `__cause__` is what the plugin itself raised.
    """
    return load(*find(group, name), base, api_version)


def load(info: PluginInfo, entry_point: metadata.EntryPoint, base: type[Any], ours: tuple[int, int]) -> type[Any]:
    """The class of this entry point. Raises PluginContractError."""
    plugin = _check_class(info, _import(info, entry_point), base)
    _check_api(info, plugin, base, ours)
    return plugin


def _import(info: PluginInfo, entry_point: metadata.EntryPoint) -> Any:
    manager = _manager_class(entry_point)
    try:
        extensions = manager(info.group.value, info.name, invoke_on_load=False).extensions
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and the panics of native modules are not an Exception
        raise PluginContractError(
            f"{info} cannot be imported from {info.value!r}: {summary(error)}",
            hint=f"repair or uninstall {info.package}; `polyaccel doctor -v` shows the traceback",
            value=info.value,
        ) from error
    if len(extensions) != 1 or extensions[0].entry_point is not entry_point:
        raise InvariantError(f"stevedore loaded {extensions} when asked for {info}", value=extensions)
    return extensions[0].plugin  # not `.driver`, which mistakes an object that is falsy for a missing one


def _manager_class(entry_point: metadata.EntryPoint) -> Any:
    """Stevedore's manager of one plugin, restricted to `entry_point` [Note: Entry point cache]."""
    try:
        from stevedore import driver  # here and not above: `polyaccel doctor` runs without it too
    except ImportError as error:
        raise PluginContractError(
            f"no plugin can be loaded without stevedore: {summary(error)}", hint="pip install 'stevedore>=5.10'"
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
            hint=f"let the entry point name a subclass of {wanted}",
            value=plugin,
        )
    if base not in plugin.__mro__:  # a class registered with the ABC passes issubclass but inherits no defaults
        raise PluginContractError(
            f"{info}: {info.value!r} is not a subclass of {wanted}",
            hint=f"derive it from {wanted}, or move the entry point to the group that it belongs to",
            value=plugin,
        )
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        raise PluginContractError(
            f"{info}: {info.value!r} lacks {len(missing)} of the methods of {wanted}: {', '.join(missing)}",
            hint=f"implement them, or install a version of {info.package} that does",
            value=plugin,
        )
    return plugin


def _check_api(info: PluginInfo, plugin: type[Any], base: type[Any], ours: tuple[int, int]) -> None:
    stated = stated_api(plugin, base)
    if stated is None:
        raise PluginContractError(
            f"{info}: {info.value!r} does not state the API version that it was written for",
            hint=f"write `API_VERSION = {ours}` in the class, as a literal: the one it inherits would always agree",
            value=plugin,
        )
    if not isinstance(stated, tuple) or [type(part) for part in stated] != [int, int]:
        raise PluginContractError(
            f"{info}: API_VERSION = {stated!r} is not a pair of integers",
            hint=f"write `API_VERSION = {ours}`",
            value=stated,
        )
    if stated[0] != ours[0] or stated[1] > ours[1]:
        newer = stated > ours
        raise PluginContractError(
            f"{info} was written for version {stated[0]}.{stated[1]} of the {info.group.noun} API; "
            f"this {_OURS} has {ours[0]}.{ours[1]}",
            hint=f"upgrade {_OURS}, or install an older {info.package}" if newer else f"upgrade {info.package}",
            value=stated,
        )


def stated_api(plugin: type[Any], base: type[Any]) -> Any:
    """Return the plugin's stated API_VERSION; None if inherited from the contract's package."""
    is_released_together = _top_package(plugin) == _top_package(base)
    for cls in plugin.__mro__:
        if "API_VERSION" in vars(cls) and (is_released_together or _top_package(cls) != _top_package(base)):
            return vars(cls)["API_VERSION"]
    return None


def _top_package(cls: type[Any]) -> str:
    return cls.__module__.partition(".")[0]
