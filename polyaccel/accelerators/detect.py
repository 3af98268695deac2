"""Which accelerator this process uses: the one named, else the best of those that are present.

The order: an explicit argument, `POLYACCEL_ACCELERATOR` or `DS_ACCELERATOR`, then the highest probe priority; where two
have that one, the user must choose. A device is present when its plugin's `probe()` says so; that its package can be
imported proves nothing. A name that no plugin has may be that of a device which torch knows
(`polyaccel.accelerators.torch_generic`), or else JAX (`polyaccel.accelerators.jax_generic`). The decision is logged
once, with the package it came from and its version.
"""

from __future__ import annotations

import logging
import os
import threading
from importlib.util import find_spec
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.errors import InvariantError, PluginConflict, PluginContractError, PluginNotFound
from polyaccel.registry import (
    PATIENCE_S,
    PROBE_LIMIT_S,
    PluginGroup,
    PluginInfo,
    PluginStatus,
    find_plugin,
    load_plugin,
    probe_all,
    probe_plugin,
)

_log = logging.getLogger(__name__)

_HOST = "cpu"
VARIABLES = ("POLYACCEL_ACCELERATOR", "DS_ACCELERATOR")

_chosen: Accelerator | None = None
_lock = threading.RLock()


def get_accelerator(*, limit_s: float = PROBE_LIMIT_S) -> Accelerator:
    """Return the accelerator of this process.

    It is the one that `set_accelerator` set, or else `choose_accelerator` chooses it at the first call.

    Args:
        limit_s: Seconds that each plugin's probe may take at the first call.

    Returns:
        The same accelerator at every call, until `set_accelerator` replaces it.

    Raises:
        PluginNotFound: No accelerator can be used, or not the one that the environment names.
        PluginConflict: Two are equally good, or the environment names two.
        PluginContractError: A plugin is broken.
    """
    global _chosen
    with _lock:
        if _chosen is None:
            _chosen = choose_accelerator(limit_s=limit_s)
        return _chosen


def set_accelerator(accelerator: Accelerator) -> None:
    """Make `get_accelerator` return `accelerator` from now on.

    Args:
        accelerator: Instance of a subclass of `polyaccel.accelerators.base.Accelerator`.

    Raises:
        PluginContractError: `accelerator` is not an `Accelerator`.
    """
    global _chosen
    if not isinstance(accelerator, Accelerator):
        raise PluginContractError(
            f"{accelerator!r} is not an accelerator",
            hint=f"pass an instance of a subclass of {Accelerator.__module__}.{Accelerator.__name__}",
            value=accelerator,
        )
    with _lock:
        _chosen = accelerator


def choose_accelerator(name: str | None = None, *, limit_s: float = PROBE_LIMIT_S) -> Accelerator:
    """Build a new accelerator: the one called `name`, else the environment's, else the best that is present.

    Args:
        name: Name of an installed plugin, of a device type of torch, or of a platform of JAX. None takes
            POLYACCEL_ACCELERATOR or DS_ACCELERATOR, and without these the plugin with the highest probe priority.
        limit_s: Seconds that each plugin's probe may take. A plugin whose probe takes longer is broken.

    Returns:
        A new accelerator; `get_accelerator` does not return it before `set_accelerator`.

    Raises:
        PluginNotFound: No installed plugin has the name, or its device is absent. The message lists every plugin and
            why it cannot be used.
        PluginConflict: The two variables disagree, or two present devices have the same priority.
        PluginContractError: A plugin is broken.
    """
    wanted, origin = (name, "the argument") if name else _from_environment()
    if wanted is None:
        return _best_present(limit_s)
    try:
        info = find_plugin(PluginGroup.ACCELERATORS, wanted)
    except PluginNotFound as error:
        found = _torch_device(wanted, origin) or _jax_device(wanted, origin)
        if found is None:
            hint = f"{error.hint}; a device of torch's has to be known to torch: import the package that adds it before"
            hint += "; one of JAX's is named as its platform"
            raise _refusal(f"no accelerator is called {wanted!r} (from {origin})", wanted, hint) from None
        return found
    plugin = load_plugin(PluginGroup.ACCELERATORS, wanted, Accelerator, Accelerator.API_VERSION)
    probe = probe_plugin(info, plugin, limit_s=limit_s)
    if not probe.usable:
        hint = "name one that can be used, or none to let the best be chosen"
        raise _refusal(f"accelerator {wanted!r} (from {origin}) cannot be used: {probe.reason}", wanted, hint)
    return _logged(info, _build(info, plugin), f"named by {origin}; {probe.reason}")


def host_accelerator(accelerator: Accelerator | None = None) -> Accelerator:
    """The accelerator whose kernels run in host memory: `accelerator` itself where that is the host, else a new one."""
    if accelerator is not None and accelerator.name == _HOST:
        return accelerator
    # The default was not a choice: the log of a run on a device must not say that it runs on the host.
    plugin = load_plugin(PluginGroup.ACCELERATORS, _HOST, Accelerator, Accelerator.API_VERSION)
    return _build(find_plugin(PluginGroup.ACCELERATORS, _HOST), plugin)


def is_a_framework_device(name: str) -> bool:
    """Whether torch or JAX knows devices called `name`, present or not, apart from the installed plugins."""
    try:
        return (_torch_device(name, "the argument") or _jax_device(name, "the argument")) is not None
    except PluginNotFound:  # known, and none is here
        return True


def _from_environment() -> tuple[str | None, str]:
    """The name that the environment asks for, and the variable it is from."""
    given = {variable: value for variable in VARIABLES if (value := os.environ.get(variable, "").strip())}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{variable}={value}" for variable, value in given.items())
        raise PluginConflict(f"the environment names two accelerators: {both}", hint="unset one of them", value=given)
    return next(((value, variable) for variable, value in given.items()), (None, ""))


def _torch_device(name: str, origin: str) -> Accelerator | None:
    """Return the accelerator for torch's device type `name`; None if torch has no such type."""
    if find_spec("torch") is None:
        return None
    from polyaccel.accelerators.torch_generic import device_plugin

    plugin = device_plugin(name)
    if plugin is None:
        return None
    probe = plugin.probe()
    if not probe.usable:
        hint = "name one that can be used, or none to let the best be chosen"
        raise _refusal(f"device {name!r} of torch's (from {origin}) cannot be used: {probe.reason}", name, hint)
    _log.info("accelerator %s, named by %s: %s", name, origin, probe.reason)
    return plugin()


def _jax_device(name: str, origin: str) -> Accelerator | None:
    """The accelerator for the platform that JAX calls `name`; None where JAX has no such platform."""
    if find_spec("jax") is None:
        return None
    from polyaccel.accelerators.jax_generic import device_plugin

    plugin = device_plugin(name)
    if plugin is None:
        return None
    _log.info("accelerator %s, named by %s: %s", name, origin, plugin.probe().reason)
    return plugin()


def _best_present(limit_s: float) -> Accelerator:
    statuses = _statuses(limit_s)
    usable = [status for status in statuses if status.usable]
    for broken in (status for status in statuses if status.error):
        _log.warning("an accelerator is left out: %s; `polyaccel doctor -v` shows where", broken.reason)
    if not usable:
        raise _refusal("no accelerator can be used here", None, "install polyaccel again: it brings one for the cpu")
    highest = max(status.priority for status in usable)
    best, *others = (status for status in usable if status.priority == highest)
    if others:
        equals = " and ".join(str(status.info) for status in (best, *others))
        names = " or ".join(f"DS_ACCELERATOR={status.info.name}" for status in (best, *others))
        raise PluginConflict(
            f"{equals} are present and have the same priority, {highest}",
            hint=f'choose one: {names}, or "accelerator" in the config',
            value=highest,
        )
    if best.plugin is None:
        raise InvariantError(f"{best.info} is usable but was not loaded", value=best)
    return _logged(best.info, _build(best.info, best.plugin), best.reason)


def _logged(info: PluginInfo, accelerator: Accelerator, why: str) -> Accelerator:
    _log.info("accelerator %s of %s: %s", info.name, info.source, why)
    return accelerator


def _build(info: PluginInfo, plugin: type[Any]) -> Accelerator:
    try:
        accelerator = plugin()
    except Exception as error:
        raise PluginContractError(
            f"{info} failed while it was constructed: {error!r}",
            hint=f"constructing must be cheap and initialise nothing: report it to the authors of {info.package}",
            value=info.value,
        ) from error
    if not isinstance(accelerator, Accelerator):
        raise InvariantError(f"{info} constructed {accelerator!r}", value=accelerator)
    return accelerator


def _statuses(limit_s: float = PATIENCE_S) -> tuple[PluginStatus, ...]:
    return probe_all(PluginGroup.ACCELERATORS, Accelerator, Accelerator.API_VERSION, limit_s=limit_s)


def _refusal(message: str, value: str | None, hint: str) -> PluginNotFound:
    """The error for `message`, with a line on every installed accelerator and why it can or cannot be used."""
    rows = "".join(
        f"\n  {status.info.name} ({status.info.source}): {'usable' if status.usable else 'not usable'}, {status.reason}"
        for status in _statuses()
    )
    return PluginNotFound(f"{message}; installed:{rows}", hint=hint, value=value)
