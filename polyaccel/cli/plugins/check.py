"""`polyaccel plugins check`: does an installed plugin keep its contract? A table for people, JUnit for CI."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

from polyaccel.errors import LaunchError, PluginConflict, PluginNotFound
from polyaccel.registry import PluginGroup, PluginInfo, find_plugin, list_plugins
from polyaccel.testkit.contract import CheckOutcome, run_test

WIDTH = 80
KINDS = {group.value.rpartition(".")[2].removesuffix("s"): group for group in PluginGroup}
"""What --kind may say: accelerator, comm, tier, storage, launcher, monitor."""

_INDENT = " " * 11
_OF_ONE = "local"
_PROBE_TIMEOUT_S = 60
_JOB_TIMEOUT_S = 120
_JOB = "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])"
_PROBE = """
import json, sys
from polyaccel.registry import PluginGroup
from polyaccel.testkit.suites import load
before = set(sys.modules)
probe = load(PluginGroup(sys.argv[1]), sys.argv[2]).probe()
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before} & {"torch", "jax"})
print("\\n" + json.dumps([probe.usable, probe.reason, loaded]))
"""


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "run the contract tests of a plugin"
    parser = actions.add_parser("check", help=summary, description=summary)
    parser.add_argument("name", metavar="NAME", help="the plugin's name, as configs write it")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks of the comm contract (default: %(default)s)")
    parser.add_argument("--kind", choices=sorted(KINDS), help="where plugins of several kinds have the name")
    parser.add_argument("--accelerator", help="whose memory a comm backend moves, or a tier is for (default: cpu)")
    parser.add_argument("--location", help="an empty place for a storage to write to (default: a temporary folder)")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the outcomes as JUnit XML too")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; the exit code is 1 when a test failed. Raises PluginNotFound and PluginConflict for the name."""
    if args.ranks < 1:
        raise LaunchError(f"{args.ranks} ranks cannot be started", cure="give -n 1 or more", value=args.ranks)
    info = choose(args.name, KINDS[args.kind] if args.kind else None)
    print(f"{info.group.noun} {info.name} of {info.source}")
    outcomes: list[tuple[str, CheckOutcome]] = []
    begin = perf_counter()
    suite = ""
    for title, outcome in examine(info, args.ranks, args.accelerator, args.location):
        if title != suite:
            print(f"\n{title}", flush=True)
            suite = title
        print(as_text(outcome), flush=True)
        outcomes.append((title, outcome))
    counts = {state: sum(outcome.state == state for _, outcome in outcomes) for state in ("ok", "failed", "skipped")}
    seconds = perf_counter() - begin
    print(f"\n{', '.join(f'{count} {state}' for state, count in counts.items())} in {seconds:.0f} s")
    if args.junit:
        as_junit(info, outcomes).write(args.junit, encoding="utf-8", xml_declaration=True)
    return int(counts["failed"] > 0)


def choose(name: str, group: PluginGroup | None) -> PluginInfo:
    """The installed plugin of this name. Raises PluginConflict when plugins of several kinds have it."""
    if group is not None:
        return find_plugin(group, name)
    groups = [one for one in PluginGroup if any(info.name == name for info in list_plugins(one))]
    if len(groups) == 1:
        return find_plugin(groups[0], name)
    if groups:
        kinds = " and ".join(kind for kind, one in KINDS.items() if one in groups)
        raise PluginConflict(
            f"{name!r} is the name of plugins of several kinds: {kinds}", cure="say --kind", value=name
        )
    names = ", ".join(sorted({info.name for one in PluginGroup for info in list_plugins(one)}))
    raise PluginNotFound(
        f"no plugin of any kind is called {name!r}; installed: {names}",
        cure="install the package that provides it, into this environment",
        value=name,
    )


def examine(
    info: PluginInfo, ranks: int, accelerator: str | None, location: str | None
) -> Iterator[tuple[str, CheckOutcome]]:
    """Every test with its suite's title, as it ends. What cannot be loaded or used here is tested no further."""
    loading = run_test("test_probing_finds_it_usable_and_loads_no_framework", lambda: _probe(info))
    yield "plugin", loading
    if loading.state == "failed":
        return
    from polyaccel.testkit import suites

    if info.group is not PluginGroup.COMM:
        chosen = info.name if info.group is PluginGroup.ACCELERATORS else accelerator or "cpu"
        for outcome in suites.run_suite(info.group, info.name, accelerator=chosen, place=location):
            yield f"{info.group.noun} contract", outcome
    if info.group is PluginGroup.LAUNCHERS:
        yield "by name", run_test("test_polyaccel_run_starts_ranks_with_it", lambda: _launch(info.name, max(ranks, 2)))
    if info.group is PluginGroup.ACCELERATORS and ranks > 1:
        yield from _ranks(info.name, None, ranks)
    if info.group is PluginGroup.COMM:
        yield from _ranks(accelerator or "cpu", info.name, max(ranks, 2))


def _ranks(accelerator: str, backend: str | None, ranks: int) -> Iterator[tuple[str, CheckOutcome]]:
    """The comm contract of `backend` (None: the accelerator's own) and training over it."""
    from polyaccel.accelerators.detect import choose_accelerator
    from polyaccel.testkit import suites
    from polyaccel.testkit.ranks.procs import RankPool

    device = choose_accelerator(accelerator)
    name = backend or device.communication_backend_name()
    title = f"comm contract: {name} between {ranks} ranks of {accelerator}"
    if name == _OF_ONE:
        yield title, CheckOutcome("test_ranks_meet", "skipped", 0.0, f"{name} joins one process")
        return
    with RankPool(ranks, backend=name, accelerator=accelerator, by_port=True) as pool:
        for outcome in suites.run_comm_suite(pool):
            yield title, outcome
            if outcome.test == "test_ranks_meet" and outcome.state == "failed":
                return
        yield f"training on {ranks} ranks", suites.run_training(pool, device)
    for outcome in suites.run_comm_faults(name, accelerator, ranks):
        yield f"comm contract: what {ranks} ranks see of one that fails", outcome


def _probe(info: PluginInfo) -> None:
    """Load and probe it in a process of its own, which nobody else has made load a framework."""
    command = [sys.executable, "-c", _PROBE, info.group.value, info.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    if done.returncode:
        raise AssertionError(_complaint(done.stderr))
    usable, reason, loaded = json.loads(done.stdout.splitlines()[-1])
    if loaded:
        raise AssertionError(f"importing and probing it imports {' and '.join(loaded)}, which takes seconds")
    if not usable:
        raise AssertionError(f"cannot be used here: {reason}")


def _launch(name: str, ranks: int) -> None:
    """Let `polyaccel run` start ranks with the launcher, as a user would."""
    with tempfile.TemporaryDirectory(prefix="polyaccel-check-") as folder:
        script = Path(folder, "job.py")
        script.write_text(_JOB)
        written = Path(folder, "ranks")
        written.mkdir()
        command = [sys.executable, "-m", "polyaccel", "run", "--launcher", name, "--nproc", str(ranks)]
        done = subprocess.run(
            [*command, str(script), str(written)],
            env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
            capture_output=True,
            text=True,
            timeout=_JOB_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"exit code {done.returncode}: {_complaint(done.stderr)}")
        found = {file.name: file.read_text() for file in written.iterdir()}
        if found != {str(rank): str(ranks) for rank in range(ranks)}:
            raise AssertionError(f"of {ranks} ranks these ran, with these world sizes: {found}")


def _complaint(stderr: str) -> str:
    """The error that ended a Python process: the line that starts the message, without the traceback above it."""
    lines = stderr.strip().splitlines() or ["the process died without a word"]
    starts = [index for index, line in enumerate(lines) if line.startswith("polyaccel.errors.")]
    return "\n".join(lines[starts[-1] :]).removeprefix("polyaccel.errors.") if starts else lines[-1]


def as_text(outcome: CheckOutcome) -> str:
    """One row, with why it failed or was skipped below it."""
    title = outcome.test.removeprefix("test_").replace("_", " ")
    why = textwrap.wrap(outcome.reason, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([f"  {outcome.state:<7}  {title:<60} {outcome.seconds:6.1f} s", *why])


def as_junit(info: PluginInfo, outcomes: list[tuple[str, CheckOutcome]]) -> ElementTree.ElementTree[Any]:
    """The outcomes in the format that CI systems read: a `testsuite` for each contract."""
    root = ElementTree.Element("testsuites", name=f"polyaccel plugins check {info.name}")
    for title in dict.fromkeys(title for title, _ in outcomes):
        rows = [outcome for suite, outcome in outcomes if suite == title]
        counts = {"failures": "failed", "skipped": "skipped"}
        suite = ElementTree.SubElement(root, "testsuite", name=title, tests=str(len(rows)), errors="0")
        for attribute, state in counts.items():
            suite.set(attribute, str(sum(row.state == state for row in rows)))
        suite.set("time", f"{sum(row.seconds for row in rows):.3f}")
        for row in rows:
            case = ElementTree.SubElement(suite, "testcase", classname=info.name, name=row.test)
            case.set("time", f"{row.seconds:.3f}")
            if row.state != "ok":
                tag = "failure" if row.state == "failed" else "skipped"
                ElementTree.SubElement(case, tag, message=row.reason).text = row.traceback or None
    return ElementTree.ElementTree(root)
