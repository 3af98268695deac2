"""`polyaccel doctor`: what this machine has, and for each plugin whether it could be used here, or why not.

It must run on the machine that is ill, so it needs the standard library only: whatever is missing or broken (stevedore,
torch, a plugin, one of our own rooms) becomes a line of the report. Versions come from metadata; torch and JAX are not
imported. Plugins are loaded and probed in this process, and what they print goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from polyaccel.cli import plugins
from polyaccel.registry import PluginGroup, PluginStatus, list_plugins, probe_all

WIDTH = 80

_CONTRACTS = {
    PluginGroup.ACCELERATORS: ("polyaccel.accelerators.base", "Accelerator"),
    PluginGroup.COMM: ("polyaccel.comm.base", "CommBackend"),
    PluginGroup.TIERS: ("polyaccel.offload.tier", "Tier"),
    PluginGroup.STORAGE: ("polyaccel.checkpoint.storage", "Storage"),
    PluginGroup.LAUNCHERS: ("polyaccel.launch.base", "Launcher"),
    PluginGroup.MONITORS: ("polyaccel.engine.metrics", "Monitor"),
}
_PACKAGES = (
    *("polyaccel", "torch", "torch-npu", "intel-extension-for-pytorch", "triton", "jax", "jaxlib"),
    *("mpi4py", "oneccl-devel", "numpy", "pydantic", "rich", "safetensors", "stevedore"),
)
_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "JAX_PLATFORMS", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
        *("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    )
)
_VARIABLE_PREFIXES = (
    "POLYACCEL_",
    "DS_",
    "NCCL_",
    "GLOO_",
    "CCL_",
    "FI_",
    "OMPI_COMM_WORLD_",
    "MV2_COMM_",
    "MPI_LOCAL",
)
_NO_LAUNCHER = "none: a program started here is one process"


@dataclass(frozen=True)
class Report:
    """All findings.

    `packages` has None for what is not installed, `launcher` says what each source of ranks sees and which one counts,
    `rooms` why a group could not be probed. `accelerator` is the one that a program started here would get, None when
    there is none because of `accelerator_problem`.
    """

    machine: Mapping[str, str]
    packages: Mapping[str, str | None]
    environment: Mapping[str, str]
    launcher: Mapping[str, str]
    plugins: Sequence[PluginStatus]
    rooms: Mapping[PluginGroup, str]
    accelerator: str | None
    accelerator_problem: str = ""

    @property
    def is_healthy(self) -> bool:
        """No plugin is broken and an accelerator can be chosen. Devices and backends may be absent."""
        return self.accelerator is not None and not self.rooms and not any(status.error for status in self.plugins)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "say what this machine has, and which plugins work here or why not"
    parser = subparsers.add_parser("doctor", help=summary, description=summary)
    parser.add_argument("-v", "--verbose", action="store_true", help="with the class and the traceback of each plugin")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 1 when a plugin is broken or no accelerator can be chosen."""
    with contextlib.redirect_stdout(sys.stderr):
        report = examine()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 is no reason to fail here
    print(json.dumps(as_json(report), indent=2) if args.json else "\n".join(as_text(report, verbose=args.verbose)))
    return 0 if report.is_healthy else 1


def examine() -> Report:
    """Look at everything."""
    statuses: list[PluginStatus] = []
    rooms = {}
    for group, (module, name) in _CONTRACTS.items():
        try:
            base = getattr(importlib.import_module(module), name)
            statuses += probe_all(group, base, base.API_VERSION)
        except Exception as error:
            rooms[group] = f"{module} cannot be imported: {type(error).__name__}: {error}"
            statuses += [PluginStatus(info, usable=False, reason="not probed") for info in list_plugins(group)]
    accelerator, problem = _chosen_accelerator()
    return Report(
        machine=_machine(),
        packages={package: _version(package) for package in _PACKAGES},
        environment={name: value for name, value in sorted(os.environ.items()) if _matters(name)},
        launcher=_launcher(),
        plugins=statuses,
        rooms=rooms,
        accelerator=accelerator,
        accelerator_problem=problem,
    )


def as_json(report: Report) -> dict[str, Any]:
    return {
        "healthy": report.is_healthy,
        "machine": dict(report.machine),
        "packages": dict(report.packages),
        "environment": dict(report.environment),
        "launcher": dict(report.launcher),
        "accelerator": report.accelerator,
        "accelerator_problem": report.accelerator_problem,
        "groups_not_probed": {group.value: why for group, why in report.rooms.items()},
        "plugins": [
            {
                **plugins.as_json(status.info),
                "api_version": status.api_version,
                "state": _state(status),
                "reason": status.reason,
                "cure": status.error.cure if status.error else "",
                "priority": status.priority,
                "traceback": status.traceback,
            }
            for status in report.plugins
        ],
    }


def as_text(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """The lines of the report, 80 columns wide but for tracebacks and long words."""
    yield from _section("machine", report.machine)
    yield from _section("packages", {name: version or "-" for name, version in report.packages.items()})
    yield from _section("environment", report.environment or {"(nothing set that matters)": ""})
    yield from _section("launcher", report.launcher)
    for group in PluginGroup:
        yield group.value
        if group in report.rooms:
            yield from _wrapped(report.rooms[group], indent=2)
        rows = [status for status in report.plugins if status.info.group is group]
        yield from _plugin_lines(rows, verbose) if rows else ["  none installed"]
        yield ""
    yield from _wrapped(f"accelerator: {report.accelerator or f'none, {report.accelerator_problem}'}", indent=0)
    if not report.is_healthy and not verbose:
        yield "Something is broken; `polyaccel doctor -v` shows tracebacks."


def _plugin_lines(statuses: Sequence[PluginStatus], verbose: bool) -> Iterator[str]:
    name_width = max((len(status.info.name) for status in statuses), default=0)
    source_width = max((len(status.info.source) for status in statuses), default=0)
    for status in statuses:
        api = "API {}.{}".format(*status.api_version) if status.api_version else ""
        head = (
            f"  {_state(status):<6}  {status.info.name:<{name_width}}  {status.info.source:<{source_width}}  {api:<7}"
        )
        line = f"{head}  {status.reason}"
        if len(line) <= WIDTH:
            yield line
        else:
            yield head.rstrip()
            yield from _wrapped(status.reason, indent=10)
        if status.error and status.error.cure:
            yield from _wrapped(f"cure: {status.error.cure}", indent=10)
        if verbose:
            yield f"{' ' * 10}{status.info.value}"
            yield from textwrap.indent(status.traceback, " " * 10).splitlines()


def _state(status: PluginStatus) -> str:
    return "usable" if status.usable else "broken" if status.error else "absent"


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


def _chosen_accelerator() -> tuple[str | None, str]:
    """The accelerator that a program started here would get, or None and why there is none."""
    try:
        detect = importlib.import_module("polyaccel.accelerators.detect")
        return str(detect.choose_accelerator(None).name), ""
    except Exception as error:
        return None, str(error)


def _launcher() -> dict[str, str]:
    """Which source of ranks a program started here would read, and what each of them sees."""
    try:
        rows = list(importlib.import_module("polyaccel.comm.discovery").look_around())
    except Exception as error:
        return {"matched": f"unknown ({type(error).__name__}: {error})"}
    matched = next((row.source for row in rows if row.matched), _NO_LAUNCHER)
    return {"matched": matched, **{row.source: row.text for row in rows}}


def _machine() -> dict[str, str]:
    facts: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "platform": platform.platform,
        "processor": _processor,
        "cores": _cores,
        "memory": _memory,
        "kernels": _kernels,
        "matrix kernels": _matrix_kernels,
    }
    return {name: _guarded(fact) for name, fact in facts.items()}


def _guarded(fact: Callable[[], str]) -> str:
    try:
        return fact()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def _cores() -> str:
    installed = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
    return f"{usable} usable of {installed}"


def _memory() -> str:
    total = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if meminfo.exists():
        available_kib = next(int(row.split()[1]) for row in meminfo.read_text().splitlines() if "MemAvailable" in row)
        total += f", {available_kib / 2**20:.1f} GiB available"
    if limit.exists() and (limit_nbytes := limit.read_text().strip()).isdigit():
        total += f", limited to {int(limit_nbytes) / 2**30:.1f} GiB by the container"
    return total


def _kernels() -> str:
    """The compiled kernels of the host, or why there are none."""
    return str(importlib.import_module("polyaccel.ops.native_library").describe_native())


def _matrix_kernels() -> str:
    """What matrix products on the host were found to gain, as far as it was measured."""
    return str(importlib.import_module("polyaccel.ops.matrix_choice").describe_matrix_kernels())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # METADATA is there, and damaged
        return f"unknown ({type(error).__name__}: {error})"


def _matters(variable: str) -> bool:
    return variable in _VARIABLES or variable.startswith(_VARIABLE_PREFIXES)
