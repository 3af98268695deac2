"""Loading and probing plugins, each within a limit: what a plugin raises, or never ends, is reported of it."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polyaccel.core import deadline
from polyaccel.core.deadline import DeadlineExceeded, run_within
from polyaccel.core.types import Probe
from polyaccel.errors import PluginContractError, PolyaccelError
from polyaccel.registry.installed import Listed, PluginGroup, PluginInfo, listed, only, summary
from polyaccel.registry.loading import load, stated_api

T = TypeVar("T")
PROBE_LIMIT_S = 30.0
"""For a plugin's import, and for its probe, where a job starts."""
PATIENCE_S = 5.0
"""The same where a caller waits for the answer."""


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """The result of loading and probing one plugin.

    `usable`, `reason` and `priority` are those of its `probe()`. When the plugin is broken `error` describes it,
    `reason` is its message, and `traceback` that of what the plugin raised ("" when it raised nothing).
    """

    info: PluginInfo
    usable: bool
    reason: str
    priority: int = 0
    plugin: type[Any] | None = None
    api_version: tuple[int, int] | None = None
    error: PolyaccelError | None = None
    traceback: str = ""


def probe_all(
    group: PluginGroup, base: type[Any], api_version: tuple[int, int], *, limit_s: float = PROBE_LIMIT_S
) -> tuple[PluginStatus, ...]:
    """Load and probe all plugins of `group`; broken or slow ones become rows with tracebacks."""
    with suppress(ImportError):
        importlib.import_module("stevedore.driver")  # so that its import is in no plugin's time
    offers = listed(group)
    return tuple(
        _probe([pair for pair in offers if pair[0].name == info.name], info, base, api_version, limit_s)
        for info, _ in offers
    )


def probe_plugin(info: PluginInfo, plugin: type[Any], *, limit_s: float = PROBE_LIMIT_S) -> Probe:
    """Return `plugin.probe()` within `limit_s` seconds. Raises PluginContractError."""

    def ask() -> Probe:
        try:
            probe = plugin.probe()
            if not isinstance(probe, Probe):
                raise TypeError(f"probe() returned {probe!r}, not a {Probe.__module__}.{Probe.__name__}")
        except KeyboardInterrupt:
            raise
        except BaseException as cause:
            raise PluginContractError(
                f"{info} failed while it was probed: {summary(cause)}",
                hint=f"a probe returns the reason instead of raising: report it to the authors of {info.package}",
                value=info.value,
            ) from cause
        return probe

    return _in_time(info, "probing", ask, limit_s)


def _in_time(info: PluginInfo, doing: str, action: Callable[[], T], limit_s: float) -> T:
    try:
        return run_within(limit_s, action)
    except DeadlineExceeded as late:
        frames = [each for each in late.stack if not _is_machinery(each.filename)]
        where = f", in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise PluginContractError(
            f"{info}: {doing} it has not ended after {limit_s:g} s{where}",
            hint=f"uninstall {info.package}, or report it to its authors: a plugin waits for no device and no server",
            value=info.value,
        ) from late


def _probe(
    found: Sequence[Listed], info: PluginInfo, base: type[Any], ours: tuple[int, int], limit_s: float
) -> PluginStatus:
    plugin = None
    try:
        plugin = _in_time(info, "importing", lambda: load(*only(found), base, ours), limit_s)
        probe = probe_plugin(info, plugin, limit_s=limit_s)
    except PolyaccelError as refusal:
        return _broken(info, plugin, refusal, refusal.__cause__)
    return PluginStatus(info, probe.usable, probe.reason, probe.priority, plugin, stated_api(plugin, base))


def _broken(
    info: PluginInfo, plugin: type[Any] | None, error: PolyaccelError, cause: BaseException | None
) -> PluginStatus:
    trace = "" if cause is None else _own_traceback(cause)
    return PluginStatus(info, usable=False, reason=error.message, plugin=plugin, error=error, traceback=trace)


def _own_traceback(cause: BaseException) -> str:
    """Return `cause`'s traceback without frames of imports, stevedore and ours."""
    if isinstance(cause, DeadlineExceeded):
        return "".join(traceback.format_list([each for each in cause.stack if not _is_machinery(each.filename)]))
    frames = cause.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(cause), cause, frames))


def _is_machinery(filename: str) -> bool:
    path = filename.replace("\\", "/")
    is_ours = filename == deadline.__file__ or Path(filename).parent == Path(__file__).parent
    return is_ours or path.startswith("<frozen ") or "/importlib/" in path or "/stevedore/" in path
