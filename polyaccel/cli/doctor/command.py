"""`polyaccel doctor`: what this machine has, and for each plugin whether it could be used here, or why not.

It must run on the machine that is ill, so it needs the standard library only: whatever is missing or broken (stevedore,
torch, a plugin, one of our packages) becomes a line of the report. Versions come from metadata; torch and JAX are not
imported. Plugins are loaded and probed in this process, and what they print goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyaccel.cli.doctor import libraries as doctor_libraries
from polyaccel.cli.doctor import machine as doctor_machine
from polyaccel.cli.parser import describe
from polyaccel.cli.plugins import command as plugins
from polyaccel.registry import PATIENCE_S, PluginGroup, PluginStatus, list_plugins, probe_all

WIDTH = 80

_CONTRACTS = {
    PluginGroup.ACCELERATORS: ("polyaccel.accelerators.base", "Accelerator"),
    PluginGroup.COMM: ("polyaccel.comm.base", "CommBackend"),
    PluginGroup.TIERS: ("polyaccel.offload.tier", "Tier"),
    PluginGroup.STORAGE: ("polyaccel.checkpoint.storage.base", "Storage"),
    PluginGroup.LAUNCHERS: ("polyaccel.launch.base", "Launcher"),
    PluginGroup.MONITORS: ("polyaccel.observability.metrics", "Monitor"),
}
_SHARED = "shm"
_ALONE = "local"
_NO_LAUNCHER = "none: a program started here is one process"


@dataclass(frozen=True)
class Report:
    """All findings.

    `packages` has None for what is not installed, `launcher` has what each source of ranks found and which one counts,
    `not_probed` why a group could not be probed. `accelerator` is what a program started here would get, None where
    there is none, `notes` its own, `comm` the backend of its ranks by where they are; `problems` why it cannot train.
    """

    machine: Mapping[str, str]
    packages: Mapping[str, str | None]
    libraries: Mapping[str, str]
    environment: Mapping[str, str]
    launcher: Mapping[str, str]
    plugins: Sequence[PluginStatus]
    not_probed: Mapping[PluginGroup, str]
    accelerator: str | None
    notes: tuple[str, ...]
    comm: Mapping[str, str]
    problems: Sequence[str]

    @property
    def is_whole(self) -> bool:
        """Nothing that is installed is broken. Devices and backends may be absent."""
        return not self.not_probed and not any(status.error for status in self.plugins)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show what this machine has, and which plugins work here or why not"
    parser = subparsers.add_parser("doctor", help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    describe(
        parser,
        examples=("polyaccel doctor", "polyaccel doctor -v"),
        codes={0: "a program started here can train", 1: "it cannot, or something that is installed is broken"},
        verbose="show the machine, packages, libraries, and each plugin with its class and traceback",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if the chosen accelerator or backend cannot train, or a plugin is broken."""
    with contextlib.redirect_stdout(sys.stderr):
        report = examine()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # also on a terminal without UTF-8
    print(json.dumps(as_json(report), indent=2) if args.json else "\n".join(as_text(report, verbose=args.verbose)))
    return int(bool(report.problems) or not report.is_whole)


def examine() -> Report:
    """Look at everything."""
    statuses: list[PluginStatus] = []
    not_probed = {}
    for group, (module, name) in _CONTRACTS.items():
        try:
            base = getattr(importlib.import_module(module), name)
            statuses += probe_all(group, base, base.API_VERSION, limit_s=PATIENCE_S)
        except Exception as error:
            not_probed[group] = f"{module} cannot be imported: {type(error).__name__}: {error}"
            statuses += [PluginStatus(info, usable=False, reason="not probed") for info in list_plugins(group)]
    accelerator, notes, comm, problems = _selection(statuses)
    launcher, of_launcher = _launcher()
    return Report(
        machine=doctor_machine.machine(),
        packages=doctor_libraries.packages(),
        libraries=doctor_libraries.libraries(),
        environment=doctor_libraries.variables(),
        launcher=launcher,
        plugins=statuses,
        not_probed=not_probed,
        accelerator=accelerator,
        notes=notes,
        comm=comm,
        problems=[*problems, *of_launcher],
    )


def as_json(report: Report) -> dict[str, Any]:
    return {
        "can_train": not report.problems,
        "problems": list(report.problems),
        "nothing_broken": report.is_whole,
        "machine": dict(report.machine),
        "packages": dict(report.packages),
        "libraries": dict(report.libraries),
        "environment": dict(report.environment),
        "launcher": dict(report.launcher),
        "accelerator": report.accelerator,
        "accelerator_notes": list(report.notes),
        "comm": dict(report.comm),
        "groups_not_probed": {group.value: why for group, why in report.not_probed.items()},
        "plugins": [
            {
                **plugins.as_json(status.info),
                "api_version": status.api_version,
                "state": _state(status),
                "reason": _reason(status),
                "hint": status.error.hint if status.error else "",
                "priority": status.priority,
                "traceback": status.traceback,
            }
            for status in report.plugins
        ],
    }


def as_text(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """The lines of the report, verdict first, 80 columns wide except for tracebacks and long words; the facts only if
    `verbose`."""
    yield from _wrapped(verdict(report), indent=0)
    for problem in report.problems:
        yield from _wrapped(f"cannot train: {problem}", indent=0)
    for group, why in report.not_probed.items():
        yield from _wrapped(f"broken: {group.value}: {why}", indent=0)
    for status in report.plugins:
        if status.error:
            name = f"{status.info.group.noun} {status.info.name} of {status.info.source}"
            yield from _wrapped(f"broken: {name}: {status.reason}", indent=0)
            yield from _wrapped(f"hint: {status.error.hint}", indent=2) if status.error.hint else ()
    for note in report.notes:
        yield from _wrapped(f"note: {note}", indent=0)
    if not verbose:
        yield "`polyaccel doctor -v` shows the machine, packages, libraries and each plugin."
        return
    yield ""
    yield from _section("machine", report.machine)
    yield from _section("packages", {name: version or "-" for name, version in report.packages.items()})
    yield from _section("libraries", report.libraries)
    yield from _section("environment", report.environment or {"(nothing set that matters)": ""})
    yield from _section("launcher", report.launcher)
    for group in PluginGroup:
        yield group.value
        if group in report.not_probed:
            yield from _wrapped(report.not_probed[group], indent=2)
        rows = [status for status in report.plugins if status.info.group is group]
        yield from _plugin_lines(rows) if rows else ["  none installed"]
        yield ""


def verdict(report: Report) -> str:
    """Return whether a program started here can train, by what, and how many installed things are broken."""
    broken = sum(status.error is not None for status in report.plugins) + len(report.not_probed)
    suffix = f"; broken: {broken}" if broken else ""
    if report.problems:
        return f"NOT READY: cannot train here{suffix}"
    frameworks = [f"{name} {report.packages[name]}" for name in ("torch", "jax") if report.packages.get(name)]
    ways = ", ".join(f"{where} by {name}" for where, name in report.comm.items())
    return f"OK: trains on {report.accelerator} with {' and '.join(frameworks)}; {ways}{suffix}"


def _plugin_lines(statuses: Sequence[PluginStatus]) -> Iterator[str]:
    name_width = max((len(status.info.name) for status in statuses), default=0)
    source_width = max((len(status.info.source) for status in statuses), default=0)
    for status in statuses:
        api = "API {}.{}".format(*status.api_version) if status.api_version else ""
        head = (
            f"  {_state(status):<6}  {status.info.name:<{name_width}}  {status.info.source:<{source_width}}  {api:<7}"
        )
        reason = _reason(status)
        line = f"{head}  {reason}"
        if len(line) <= WIDTH:
            yield line
        else:
            yield head.rstrip()
            yield from _wrapped(reason, indent=10)
        if status.error and status.error.hint:
            yield from _wrapped(f"hint: {status.error.hint}", indent=10)
        yield f"{' ' * 10}{status.info.value}"
        yield from textwrap.indent(status.traceback, " " * 10).splitlines()


def _state(status: PluginStatus) -> str:
    if not status.usable:
        return "broken" if status.error else "absent"
    return "partly" if _lacks_torch(status) else "usable"


def _reason(status: PluginStatus) -> str:
    if not status.usable or not _lacks_torch(status):
        return status.reason
    rest = "functions of JAX train on it" if _frameworks(status) else "and JAX cannot read its memory (import_array)"
    return f"{status.reason}; no torch module trains on it, torch_device_type is None; {rest}"


def _lacks_torch(status: PluginStatus) -> bool:
    return status.info.group is PluginGroup.ACCELERATORS and "torch" not in _frameworks(status)


def _frameworks(status: PluginStatus) -> tuple[str, ...]:
    base = importlib.import_module("polyaccel.accelerators.base")
    return tuple(base.frameworks_of(status.plugin))


def _section(title: str, facts: Mapping[str, str]) -> Iterator[str]:
    width = max(len(name) for name in facts)
    yield title
    for name, value in facts.items():
        first, *rest = textwrap.wrap(value, WIDTH - width - 4) or [""]
        yield f"  {name:<{width}}  {first}".rstrip()
        yield from (f"{' ' * (width + 4)}{line}" for line in rest)
    yield ""


def _wrapped(text: str, *, indent: int) -> list[str]:
    """Each line of `text` wrapped."""
    margin = " " * indent
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False)
    ]


def _selection(
    statuses: Sequence[PluginStatus],
) -> tuple[str | None, tuple[str, ...], dict[str, str], list[str]]:
    """The accelerator that a program started here would get, its notes, its comm backend, and why it cannot train."""
    problems = []
    installed = {name for name in ("torch", "jax") if importlib.util.find_spec(name)}
    if not installed:
        problems.append("neither torch nor jax is installed")
    try:
        detect = importlib.import_module("polyaccel.accelerators.detect")
        chosen = detect.choose_accelerator(None, limit_s=PATIENCE_S)
        accelerator, notes = str(chosen.name), tuple(chosen.capabilities().notes)
        comm = os.environ.get("POLYACCEL_COMM") or str(chosen.communication_backend_name())
    except Exception as error:
        return None, (), {}, [*problems, str(error)]
    trains = set(importlib.import_module("polyaccel.accelerators.base").frameworks_of(type(chosen)))
    if installed and not trains & installed:
        by = " or ".join(sorted(trains)) or "no framework: torch_device_type is None, and there is no import_array"
        problems.append(f"accelerator {accelerator!r} trains models of {by}; installed: {', '.join(sorted(installed))}")
    backends = {status.info.name: status for status in statuses if status.info.group is PluginGroup.COMM}
    row = backends.get(comm)
    if row is not None and not row.usable:
        problems.append(f"comm backend {comm!r} cannot be used: {row.reason}")
    elif row is None and not _is_backend(comm):
        problems.append(f"no comm backend is called {comm!r}")
    shared = backends.get(_SHARED)
    is_shared = comm in ("gloo", _ALONE) and accelerator == "cpu" and shared is not None and shared.usable
    near = _SHARED if is_shared and "POLYACCEL_COMM" not in os.environ else comm
    far = "none, which takes torch or MPI" if comm == _ALONE else comm
    return accelerator, notes, {"within a host": near, "between hosts": far}, problems


def _is_backend(name: str) -> bool:
    """Whether some package offers `name` to torch, without being a plugin of ours."""
    try:
        return importlib.import_module("polyaccel.comm.init.backends").comm_backend(name) is not None
    except Exception:
        return False


def _launcher() -> tuple[dict[str, str], list[str]]:
    """Which source of ranks a program started here would read, what each of them sees, and why it cannot be read."""
    try:
        rows = list(importlib.import_module("polyaccel.comm.discovery").list_sources())
    except Exception as error:
        return {"matched": f"unknown ({type(error).__name__}: {error})"}, []
    matched = next((row.source for row in rows if row.matched), _NO_LAUNCHER)
    problems = [f"variables of the launcher, {row.source}: {row.problem}" for row in rows if row.problem]
    return {"matched": matched, **{row.source: row.text for row in rows}}, problems
