"""`polyaccel plugins check`: does an installed plugin keep its contract? A table for people, JUnit for CI."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

from polyaccel.cli.parser import describe
from polyaccel.errors import LaunchError, PluginConflict, PluginNotFound
from polyaccel.registry import PluginGroup, PluginInfo, find_plugin, list_plugins
from polyaccel.testkit.contract import TIMEOUT_S, CheckOutcome, CheckRow, run_test

WIDTH = 80
KINDS = {group.value.rpartition(".")[2].removesuffix("s"): group for group in PluginGroup}
"""The values of --kind: accelerator, comm, tier, storage, launcher, monitor."""

_RANKS = 3
_LONG_TITLE = 60
_STARTS = 4  # Pythons that start in turn until the ranks of `polyaccel run` have ended
_JOB = "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])"
_STARTS_RANKS = "`polyaccel run` starts ranks with the launcher, by its name: that is how users come to it."


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "run the contract tests of a plugin"
    parser = actions.add_parser("check", help=summary, description=summary)
    parser.add_argument("name", metavar="NAME", help="the plugin's name, as configs write it")
    ranks = "ranks of the comm contract (default: %(default)s, the fewest that show an order of addition)"
    parser.add_argument("-n", "--ranks", type=int, default=_RANKS, help=ranks)
    parser.add_argument("--kind", choices=sorted(KINDS), help="where plugins of several kinds have the name")
    parser.add_argument("--accelerator", help="whose memory a comm backend moves, or a tier is for (default: cpu)")
    parser.add_argument("--location", help="an empty place for a storage to write to (default: a temporary folder)")
    timeout = "seconds in which a row must show progress (default: %(default)g); one that does not is cut and fails"
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help=timeout)
    parser.add_argument("--only", metavar="TEXT", help="run only the rows whose title has this text")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the outcomes as JUnit XML too")
    describe(
        parser,
        examples=("polyaccel plugins check shm", "polyaccel plugins check acme --kind accelerator --junit report.xml"),
        codes={0: "every row passed", 1: "a row failed, or an error, stated on standard error"},
        verbose="explain what each row wants and why, and show the tracebacks of those that fail",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; the exit code is 1 when a test failed. Raises PluginNotFound and PluginConflict for the name."""
    if args.ranks < 1:
        raise LaunchError(f"{args.ranks} ranks cannot be started", hint="give -n 1 or more", value=args.ranks)
    if not args.timeout > 0:
        raise LaunchError(f"--timeout {args.timeout:g}: expected seconds, more than 0", value=args.timeout)
    info = choose(args.name, KINDS[args.kind] if args.kind else None)
    print(f"{info.group.noun} {info.name} of {info.source}")
    rows: list[CheckRow] = []
    begin = perf_counter()
    suite = ""
    for row in examine(info, args.ranks, args.accelerator, args.location, args.timeout):
        if args.only and args.only not in row.title and row.test != "test_ranks_meet":
            continue
        if row.suite != suite:
            print(f"\n{row.suite}", flush=True)
            suite = row.suite
        print(f"  {row.title:<{_LONG_TITLE}} ", end="", flush=True)
        outcome = row.run()
        print(f"{outcome.state:<7} {outcome.seconds:6.1f} s", flush=True)
        for line in details(row, verbose=args.verbose):
            print(line, flush=True)
        rows.append(row)
    states = [outcome.state for outcome in _outcomes(rows)]
    counts = {state: states.count(state) for state in ("ok", "failed", "skipped")}
    seconds = perf_counter() - begin
    print(f"\n{', '.join(f'{count} {state}' for state, count in counts.items())} in {seconds:.0f} s")
    if args.junit:
        as_junit(info, rows).write(args.junit, encoding="utf-8", xml_declaration=True)
    return int(counts["failed"] > 0)


def choose(name: str, group: PluginGroup | None) -> PluginInfo:
    """Return the installed plugin of this name, or a device of torch or JAX."""
    groups = [one for one in PluginGroup if any(info.name == name for info in list_plugins(one))]
    if not groups and group in (None, PluginGroup.ACCELERATORS) and _is_a_framework_device(name):
        package = "torch or JAX"
        return PluginInfo(PluginGroup.ACCELERATORS, name, "", package, "without a plugin")
    if group is not None:
        return find_plugin(group, name)
    if len(groups) == 1:
        return find_plugin(groups[0], name)
    if groups:
        kinds = " and ".join(kind for kind, one in KINDS.items() if one in groups)
        raise PluginConflict(
            f"{name!r} is the name of plugins of several kinds: {kinds}", hint="give --kind", value=name
        )
    names = ", ".join(sorted({info.name for one in PluginGroup for info in list_plugins(one)}))
    raise PluginNotFound(
        f"no plugin of any kind is called {name!r}; installed: {names}",
        hint="install the package that provides it, into this environment",
        value=name,
    )


def examine(
    info: PluginInfo, ranks: int, accelerator: str | None, location: str | None, timeout_s: float
) -> Iterator[CheckRow]:
    """Every row, before it runs. What cannot be loaded or used here is tested no further."""
    from polyaccel.testkit.suites import Subject, contract_rows, jax_rows, loading_rows, rank_rows

    device = info.name if info.group is PluginGroup.ACCELERATORS else accelerator or "cpu"
    subject = Subject(info.group, info.name, device, location, ranks, timeout_s)
    if info.value:
        for row in loading_rows(subject):
            yield row
            if row.has_failed:
                return
    if info.group is not PluginGroup.COMM:
        yield from contract_rows(subject)
    if info.group is PluginGroup.LAUNCHERS:
        test = "test_polyaccel_run_starts_ranks_with_it"
        launch = partial(_launch, info.name, max(ranks, 2), timeout_s)
        yield CheckRow("by name", test, _STARTS_RANKS, partial(run_test, test, launch))
    if info.group is PluginGroup.ACCELERATORS and ranks > 1:
        yield from rank_rows(subject, None)
        yield from jax_rows(subject)
    if info.group is PluginGroup.COMM:
        yield from rank_rows(replace(subject, ranks=max(ranks, 2)), info.name)


def details(row: CheckRow, *, verbose: bool) -> Iterator[str]:
    """The lines below a row: what it wants, where that was not got or is asked for, and why it ended as it did."""
    outcome = row.outcome
    if outcome is None:
        return
    if verbose or outcome.state == "failed":
        yield from _indented("wants", row.wants)
    yield from _indented("why" if outcome.state == "skipped" else "found", outcome.reason)
    yield from _indented("hint", outcome.hint)
    if verbose and outcome.traceback:
        yield from textwrap.indent(outcome.traceback.rstrip(), " " * 6).splitlines()


def _indented(head: str, text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(line, WIDTH, initial_indent=f"    {head:<6} ", subsequent_indent=" " * 11)
        head = ""


def as_junit(info: PluginInfo, rows: list[CheckRow]) -> ElementTree.ElementTree[Any]:
    """The outcomes in the format that CI systems read: a `testsuite` for each contract."""
    root = ElementTree.Element("testsuites", name=f"polyaccel plugins check {info.name}")
    for title in dict.fromkeys(row.suite for row in rows):
        outcomes = list(_outcomes([row for row in rows if row.suite == title]))
        counts = {"failures": "failed", "skipped": "skipped"}
        suite = ElementTree.SubElement(root, "testsuite", name=title, tests=str(len(outcomes)), errors="0")
        for attribute, state in counts.items():
            suite.set(attribute, str(sum(outcome.state == state for outcome in outcomes)))
        suite.set("time", f"{sum(outcome.seconds for outcome in outcomes):.3f}")
        for outcome in outcomes:
            case = ElementTree.SubElement(suite, "testcase", classname=info.name, name=outcome.test)
            case.set("time", f"{outcome.seconds:.3f}")
            if outcome.state != "ok":
                tag = "failure" if outcome.state == "failed" else "skipped"
                ElementTree.SubElement(case, tag, message=outcome.reason).text = outcome.traceback or None
    return ElementTree.ElementTree(root)


def _outcomes(rows: list[CheckRow]) -> Iterator[CheckOutcome]:
    return (row.outcome for row in rows if row.outcome is not None)


def _is_a_framework_device(name: str) -> bool:
    from polyaccel.accelerators.detect import is_a_framework_device

    return is_a_framework_device(name)


def _launch(name: str, ranks: int, timeout_s: float) -> None:
    """Let `polyaccel run` start ranks with the launcher, as a user would."""
    from polyaccel.testkit.comparison import equal
    from polyaccel.testkit.loading import complaint

    with tempfile.TemporaryDirectory(prefix="polyaccel-check-") as folder:
        script = Path(folder, "job.py")
        script.write_text(_JOB)
        written = Path(folder, "ranks")
        written.mkdir()
        command = [sys.executable, "-m", "polyaccel", "run", "--launcher", name, "--ranks", str(ranks)]
        done = subprocess.run(
            [*command, str(script), str(written)],
            env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
            capture_output=True,
            text=True,
            timeout=_STARTS * timeout_s,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"exit code: expected 0, got {done.returncode}: {complaint(done.stderr)}")
        found = {file.name: file.read_text() for file in written.iterdir()}
        equal(found, {str(rank): str(ranks) for rank in range(ranks)}, "world sizes by rank")
