"""`polyaccel plugins check`: a table, an exit code and JUnit for CI; a plugin that is broken, crashes or lies is a row
that says so, and everybody else's goes on working."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from throwaway import Distribution, install, python

from polyaccel.cli.main import main
from polyaccel.cli.plugins import check as plugins_check

ACCELERATORS, STORAGE = "polyaccel.accelerators", "polyaccel.storage"
ACCELERATOR = """
from dataclasses import replace
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import Probe

class Device(CpuAccelerator):
    API_VERSION = (3, 0)
    name = "{name}"
    @classmethod
    def probe(cls):
        return Probe(True, "for the test", priority=-1)
"""
LIAR = (
    ACCELERATOR
    + """
    def capabilities(self):
        return replace(super().capabilities(), streams=True, host_pinning=True)
"""
)
FRAGILE = """
import os
from polyaccel.checkpoint.storage.file import FileStorage

class Fragile(FileStorage):
    API_VERSION = (2, 0)
    name = "fragile"
    def names(self, path=""):
        os.abort()
"""


def plugin(name: str, source: str, group: str = ACCELERATORS, cls: str = "Device", **more: str) -> Distribution:
    package = f"acme_{more.get('package', name)}"
    return Distribution(package, "1.5", source, {group: {name: f"{package}:{cls}"}})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of one name, one for another API, one that raises at import, one that lies, one that crashes, a good one."""
    site = tmp_path_factory.mktemp("plugins") / "site"
    good = ACCELERATOR.format(name="good")
    install(
        site,
        plugin("good", good),
        plugin("twin", good, package="twin_a"),
        plugin("twin", good, package="twin_b"),
        plugin("future", good.replace("(3, 0)", "(9, 0)")),
        plugin("raising", "raise OSError('no such bus')"),
        plugin("heavy", f"import sys, types\nsys.modules['jax'] = types.ModuleType('jax')\n{good}"),
        plugin("lying", LIAR.format(name="lying")),
        plugin("fragile", FRAGILE, STORAGE, "Fragile"),
    )
    return site


def check(site: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys\nfrom polyaccel.cli.main import main\nsys.exit(main(['plugins', 'check', *{arguments!r}]))"
    return python(code, site, cache=cache, check=False)


def failed(output: str) -> dict[str, str]:
    """Of each failed row what was found, which may go on over several lines."""
    found: dict[str, str] = {}
    title = head = ""
    for line in output.splitlines():
        if line.startswith("  ") and line[2] != " ":
            title = line[2:63].strip() if line[63:].startswith("failed ") else ""
            found |= {title: ""} if title else {}
        elif title and line.startswith("    "):
            head = line[4:10].strip() or head
            found[title] += f"{line[11:]} " if head == "found" else ""
    return found


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        (
            "future",
            "the class loads",
            "accelerator 'future' (package acme_future 1.5) was written for version 9.0 of the accelerator API; ",
        ),
        (
            "raising",
            "the class loads",
            "accelerator 'raising' (package acme_raising 1.5) cannot be imported from ",
        ),
        ("heavy", "probing loads no framework", "frameworks that importing and probing it imports: expected [], got"),
        ("npu", "it can be used here", "cannot be used here: no Ascend NPU"),
    ],
)
def test_a_plugin_that_cannot_be_used_fails_with_its_reason(
    name: str, row: str, reason: str, site: Path, tmp_path: Path
) -> None:
    done = check(site, tmp_path, name)
    assert done.returncode == 1
    ((title, found),) = failed(done.stdout).items()
    assert title == row
    assert found.removeprefix("importing it: ").startswith(reason)
    assert " 1 failed, 0 skipped" in done.stdout


def test_two_plugins_of_one_name_are_both_named(site: Path, tmp_path: Path) -> None:
    done = check(site, tmp_path, "twin")
    assert done.returncode == 1
    assert "acme_twin_a:Device of acme_twin_a 1.5 and acme_twin_b:Device of acme_twin_b 1.5" in done.stderr
    assert "hint: keep one: pip uninstall" in done.stderr


def test_lies_in_capabilities_turn_the_rows_about_them_red(site: Path, tmp_path: Path) -> None:
    done = check(site, tmp_path, "lying", "-n", "1")
    assert done.returncode == 1, done.stdout
    rows = failed(done.stdout)
    assert rows.keys() == {
        "streams overlap where that is claimed",
        "pinned copies are part of their stream",
        "torch knows enough of the device",
    }
    assert rows["streams overlap where that is claimed"].startswith("streams=True is claimed, but work on one")
    assert rows["pinned copies are part of their stream"].startswith("host_pinning is claimed, but allocate(")
    assert "`record_stream`, where `streams` is claimed" in rows["torch knows enough of the device"]


def test_a_crash_is_one_row_and_the_others_are_run(site: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    done = check(site, tmp_path, "fragile", "--junit", str(report))
    assert done.returncode == 1
    rows = failed(done.stdout)
    assert "names are sorted and only of one folder" in rows
    assert all("died with exit code -6 (SIGABRT) at acme_fragile.py:" in reason for reason in rows.values())
    assert re.search("^  files are written and read +ok ", done.stdout, re.MULTILINE)
    suites = {suite.get("name"): suite for suite in ElementTree.parse(report).getroot()}
    assert set(suites) == {"plugin", "storage contract"}
    contract = suites["storage contract"]
    assert contract.get("failures") == str(len(rows))
    assert contract.get("tests") == str(len(contract))
    named = {case.get("name"): case.find("failure") for case in contract}
    assert named["test_files_are_written_and_read"] is None
    failure = named["test_names_are_sorted_and_only_of_one_folder"]
    assert failure is not None
    assert "exit code -6" in (failure.get("message") or "")
    assert "Traceback" in (failure.text or "")


def test_only_some_rows_are_run_and_each_says_what_it_wants(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "file", "--only", "large", "-v"]) == 0
    output = " ".join(capfd.readouterr().out.split())
    assert "a file may be large ok" in output
    assert "wants A file of many chunks has all of them, in order: tensors are larger than any buffer." in output
    assert "1 ok, 0 failed, 0 skipped" in output


def test_the_rest_keeps_working_beside_broken_plugins(site: Path, tmp_path: Path) -> None:
    code = """
import json, sys
from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.accelerators.base import Accelerator
from polyaccel.registry import PluginGroup, probe_all
print(choose_accelerator().name, choose_accelerator("good").name)
for row in probe_all(PluginGroup.ACCELERATORS, Accelerator, Accelerator.API_VERSION):
    print(row.info.name, row.info.package, "broken" if row.error else "usable" if row.usable else "absent")
"""
    lines = python(code, site, cache=tmp_path).stdout.splitlines()
    assert lines[0] == "cpu good"
    assert {"good acme_good usable", "lying acme_lying usable", "cpu polyaccel usable"} <= set(lines)
    broken = {line.split()[1] for line in lines if line.endswith(" broken")}
    assert broken == {"acme_twin_a", "acme_twin_b", "acme_future", "acme_raising"}


def test_a_name_of_several_kinds_asks_for_the_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "local"]) == 1
    assert (
        "'local' is the name of plugins of several kinds: comm and launcher\n  hint: give --kind"
        in capsys.readouterr().err
    )
    assert main(["plugins", "check", "pigeon"]) == 1
    assert "no plugin of any kind is called 'pigeon'" in capsys.readouterr().err
    assert main(["plugins", "check", "cpu", "-n", "0"]) == 1
    assert "0 ranks cannot be started" in capsys.readouterr().err
    assert main(["plugins", "check", "cpu", "--timeout", "0"]) == 1
    assert "--timeout 0: expected seconds, more than 0" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_a_comm_backend_is_checked_between_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    assert main(["plugins", "check", "gloo", "-n", "2", "--junit", str(report)]) == 0
    output = capfd.readouterr().out
    assert re.search("^comm contract: gloo between 2 ranks of cpu\n  ranks meet +ok ", output, re.MULTILINE)
    assert re.search("^  ten steps of a torch module agree at every stage +ok ", output, re.MULTILINE)
    assert max(map(len, output.splitlines())) <= 80
    cases = ElementTree.parse(report).getroot().findall("*/testcase")
    assert f"\n{len(cases)} ok, 0 failed, 0 skipped in " in output


PAPER = """
from jax._src import xla_bridge
def initialize():
    xla_bridge.register_backend_factory("paper", xla_bridge.make_cpu_client, priority=-1)
"""


def test_a_device_that_only_jax_knows_is_checked_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    site = tmp_path / "site"
    install(site, Distribution("paper_plugin", "1.0", PAPER, {"jax_plugins": {"paper": "paper_plugin"}}))
    done = check(site, tmp_path, "paper", "-n", "2", "--only", "a function of jax")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("accelerator paper of torch or JAX without a plugin\n")
    assert re.search("^  steps of a function of jax agree at every stage +ok ", done.stdout, re.MULTILINE)


def test_it_needs_no_pytest() -> None:
    code = (
        "import sys\nimport polyaccel.testkit.suites, polyaccel.testkit.accelerator\nassert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


def test_every_kind_of_plugin_can_be_named() -> None:
    assert set(plugins_check.KINDS) == {"accelerator", "comm", "tier", "storage", "launcher", "monitor"}
