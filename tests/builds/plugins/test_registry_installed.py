"""The registry against distributions that pip really installed: good ones, and broken ones of every kind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from throwaway import Distribution, install, python

TIERS = "polyaccel.tiers"
OURS = {"device", "host", "nvme"}
TIER = """
from polyaccel.accelerators.base import Probe
from polyaccel.offload.tier import Tier

class AcmeTier(Tier):
    API_VERSION = (2, 0)
    name = "acme"
    compute = None
    def open(self, accelerator, host, options): ...
    def allocate(self, key, numel, dtype): ...
    def stream_groups(self, groups): ...
    def close(self): ...
"""


def tier(package: str, version: str = "1.0", source: str = TIER, value: str = "AcmeTier") -> Distribution:
    """A distribution whose tier is called after the package."""
    name = package.removeprefix("acme_")
    return Distribution(package, version, source, {TIERS: {name: f"{package}:{value}"}})


BROKEN = """
print("imported")

def start():
    raise OSError("no such bus")
start()
"""
REFUSED = {
    "broken": (
        tier("acme_broken", "0.3", BROKEN),
        r"tier 'broken' \(package acme_broken 0\.3\) cannot .* OSError: no such bus\n  hint: repair",
    ),
    "exits": (
        tier("acme_exits", source="import sys\nsys.exit('no licence')\n"),
        r"acme_exits 1\.0\) cannot be imported .*SystemExit: no licence",
    ),
    "syntax": (
        tier("acme_syntax", source="class AcmeTier(\n"),
        r"acme_syntax 1\.0\) cannot be imported .*SyntaxError",
    ),
    "needy": (
        tier("acme_needy", source="import acme_is_not_installed\n"),
        r"acme_needy 1\.0\) .*ModuleNotFoundError: No module named 'acme_is_not_installed'",
    ),
    "nameless": (
        tier("acme_nameless", value="Other"),
        r"acme_nameless 1\.0\) .*AttributeError: .*'Other'",
    ),
    "function": (
        tier("acme_function", source="def AcmeTier(): ...\n"),
        r"acme_function 1\.0\): 'acme_function:AcmeTier' is not a class but a function",
    ),
    "stranger": (
        tier("acme_stranger", source="class AcmeTier:\n    API_VERSION = (2, 0)\n"),
        r"acme_stranger 1\.0\): .* is not a subclass of polyaccel\.offload\.tier\.Tier\n  hint: derive it",
    ),
    "partial": (
        tier("acme_partial", source=TIER.replace("def stream_groups", "def bring").replace("def close", "def shut")),
        r"acme_partial 1\.0\): .* lacks 2 of the methods of polyaccel\.offload\.tier\.Tier: close, stream_groups\n",
    ),
    "old": (
        tier("acme_old", "0.0.9", TIER.replace("(2, 0)", "(1, 7)")),
        r"acme_old 0\.0\.9\) .* version 1\.7 of the tier API; this polyaccel has 2\.1\n  hint: upgrade acme_old$",
    ),
    "future": (
        tier("acme_future", source=TIER.replace("(2, 0)", "(3, 0)")),
        r"acme_future 1\.0\) .* version 3\.0 .*\n  hint: upgrade polyaccel, or install an older acme_future$",
    ),
    "minor": (
        tier("acme_minor", source=TIER.replace("(2, 0)", "(2, 99)")),
        r"acme_minor 1\.0\) was written for version 2\.99 .*\n  hint: upgrade polyaccel",
    ),
    "silent": (
        tier("acme_silent", source=TIER.replace("    API_VERSION = (2, 0)\n", "")),
        r"acme_silent 1\.0\): .* does not state the API version .*\n  hint: write `API_VERSION = \(2, 1\)`",
    ),
}
PROBE_RAISES = TIER + "    @classmethod\n    def probe(cls):\n        raise RuntimeError('driver mismatch')\n"
OUTCOMES = """
import json, sys
from polyaccel.errors import PolyaccelError
from polyaccel.offload.tier import Tier
from polyaccel.registry import PluginGroup, list_plugins, load_plugin, probe_all

outcomes = {}
for info in list_plugins(PluginGroup.TIERS):
    try:
        outcomes[info.name] = repr(load_plugin(PluginGroup.TIERS, info.name, Tier, Tier.API_VERSION))
    except PolyaccelError as error:
        outcomes[info.name] = f"{type(error).__name__}: {error}"
rows = {
    row.info.name: [row.usable, row.reason, row.traceback, row.api_version, str(row.error)]
    for row in probe_all(PluginGroup.TIERS, Tier, Tier.API_VERSION)
}
json.dump([outcomes, rows], sys.stderr)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every refused plugin, one whose probe raises, and a good one, side by side."""
    site = tmp_path_factory.mktemp("plugins") / "site"
    broken = [distribution for distribution, _ in REFUSED.values()]
    install(site, *broken, tier("acme_raises", source=PROBE_RAISES), tier("acme_good", "2.5"))
    return site


@pytest.fixture(scope="module")
def outcomes(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    """What loading each gave, and its row in `probe_all`: one interpreter for all of them."""
    done = python(OUTCOMES, site, cache=tmp_path_factory.mktemp("cache"))
    loaded, rows = json.loads(done.stderr)
    return loaded, rows


def test_listing_imports_no_plugin_and_names_package_and_version(site: Path, tmp_path: Path) -> None:
    code = """
import sys
from polyaccel.registry import PluginGroup, list_plugins
rows = [f"{info.name} {info.value} {info.source}" for info in list_plugins(PluginGroup.TIERS)]
loaded = [name for name in sys.modules if name.startswith(("acme", "stevedore", "torch", "polyaccel.offload"))]
print(rows, loaded)
"""
    rows, loaded = python(code, site, cache=tmp_path).stdout.strip().rsplit(" [", 1)  # the broken one prints, if run
    assert loaded == "]"
    assert "'good acme_good:AcmeTier acme_good 2.5'" in rows
    assert "'broken acme_broken:AcmeTier acme_broken 0.3'" in rows
    assert "'device polyaccel.offload.device:DeviceTier polyaccel " in rows


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_plugin_is_refused_with_package_version_and_cure(
    name: str, outcomes: tuple[dict[str, str], dict[str, Any]]
) -> None:
    _, pattern = REFUSED[name]
    assert re.search(pattern, outcomes[0][name]), outcomes[0][name]
    assert outcomes[0][name].startswith("PluginContractError: tier ")


def test_broken_plugins_break_no_others(outcomes: tuple[dict[str, str], dict[str, Any]]) -> None:
    loaded, rows = outcomes
    assert loaded["good"] == "<class 'acme_good.AcmeTier'>"
    assert loaded["device"] == "<class 'polyaccel.offload.device.DeviceTier'>"
    assert loaded["raises"] == "<class 'acme_raises.AcmeTier'>"
    assert {name for name, row in rows.items() if row[0]} == {"good", *OURS}
    assert rows["good"][3] == [2, 0]
    assert set(rows) == {*REFUSED, "good", *OURS, "raises"}


def test_the_plugins_own_traceback_is_kept(outcomes: tuple[dict[str, str], dict[str, Any]]) -> None:
    _, rows = outcomes
    for name, function, line, error in (
        ("broken", "start", 5, "OSError: no such bus"),
        ("raises", "probe", TIER.count("\n") + 3, "RuntimeError: driver mismatch"),
    ):
        lines = rows[name][2].splitlines()
        assert f'acme_{name}.py", line ' in lines[1], "the first frame is the plugin's"
        assert any(f'acme_{name}.py", line {line}, in {function}' in text for text in lines)
        assert lines[-1] == error
        assert "stevedore" not in rows[name][2]
    assert "RuntimeError: driver mismatch" in rows["raises"][1]
    assert "(package acme_raises 1.0)" in rows["raises"][1]
    assert rows["old"][2] == "", "our own finding has no traceback"


def test_a_name_offered_twice_fails_closed_and_names_both(tmp_path: Path) -> None:
    site = tmp_path / "site"
    twin = Distribution(
        "acme_twin", "4.2", TIER, {TIERS: {"good": "acme_twin:AcmeTier", "other": "acme_twin:AcmeTier"}}
    )
    install(site, tier("acme_good", "2.5"), twin)
    loaded, rows = json.loads(python(OUTCOMES, site, cache=tmp_path / "cache").stderr)
    assert loaded["good"].startswith("PluginConflict: tier 'good' is offered more than once: ")
    assert "acme_good:AcmeTier of acme_good 2.5 and acme_twin:AcmeTier of acme_twin 4.2" in loaded["good"]
    assert "hint: keep one: pip uninstall acme_good or acme_twin" in loaded["good"]
    assert (rows["good"][0], rows["other"][0], rows["device"][0]) == (False, True, True)


def test_a_distribution_hidden_by_another_of_its_name_is_no_conflict(tmp_path: Path) -> None:
    near, far = tmp_path / "near" / "site", tmp_path / "far" / "site"
    install(near, tier("acme_good", "2.5"))
    install(far, tier("acme_good", "2.4"))
    code = "from polyaccel.registry import *; print(find_plugin(PluginGroup.TIERS, 'good').source)"
    assert python(code, near, far, cache=tmp_path / "cache").stdout == "acme_good 2.5\n"
    _damage_entry_points_of_an_unrelated_package(far)
    assert python(code, near, far, cache=tmp_path / "cache").stdout == "acme_good 2.5\n"


FIND_BOTH = """
import sys
sys.executable = "/opt/python"  # stevedore switches its cache off for an interpreter under /tmp
from stevedore import ExtensionManager
from polyaccel.errors import PluginNotFound
from polyaccel.offload.tier import Tier
from polyaccel.registry import PluginGroup, load_plugin
stock = sorted(set(ExtensionManager("polyaccel.tiers").entry_points_names()) - {"device", "host", "nvme"})
try:
    print(stock, load_plugin(PluginGroup.TIERS, "added", Tier, Tier.API_VERSION).__name__)
except PluginNotFound as error:
    print(stock, error)
"""


def test_a_new_entry_point_of_a_reinstalled_plugin_is_seen(tmp_path: Path) -> None:
    """[Note: Entry point cache] with the trap really set: stevedore alone still sees the old installation."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    value = "acme_good:AcmeTier"
    install(site, tier("acme_good", "2.5"))
    _set_mtimes(site, 0)
    before = python(FIND_BOTH, site, cache=cache).stdout
    assert before.startswith("['good'] no tier plugin is called 'added'; installed: device (polyaccel ")

    install(site, Distribution("acme_good", "2.5", TIER, {TIERS: {"good": value, "added": value}}))
    _set_mtimes(site, 30)
    assert list((cache / "python-entrypoints").iterdir()), "stevedore did not write the cache that this test is about"
    assert python(FIND_BOTH, site, cache=cache).stdout == "['good'] AcmeTier\n"


def _set_mtimes(site: Path, seconds_later: int) -> None:
    """Times that round to the same 32-bit float: near a multiple of its spacing, 128 s."""
    moment = 1_700_000_000 // 128 * 128 + seconds_later
    for path in [*site.glob("*.dist-info/entry_points.txt"), site]:
        os.utime(path, (moment, moment))


def test_unreadable_metadata_hides_no_other_plugin(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, tier("acme_good", "2.5"), tier("acme_bare"))
    (site / "acme_bare-1.0.dist-info" / "METADATA").unlink()
    code = """
from polyaccel.registry import *
print(*(info.source for info in list_plugins(PluginGroup.TIERS) if info.package != "polyaccel"), sep="\\n")
"""
    unnamed = f"{site / 'acme_bare-1.0.dist-info'} of unknown version"
    assert python(code, site, cache=tmp_path / "cache").stdout == f"{unnamed}\nacme_good 2.5\n"

    _damage_entry_points_of_an_unrelated_package(site)
    done = python(code, site, cache=tmp_path / "cache")
    assert "acme_good 2.5" in done.stdout
    assert "unrelated-1.0.dist-info are left out" in done.stderr


def _damage_entry_points_of_an_unrelated_package(site: Path) -> None:
    install(site, Distribution("unrelated", "1.0", "", {"console_scripts": {"unrelated": "unrelated:main"}}))
    (site / "unrelated-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")


def test_a_plugin_installed_while_the_process_runs_is_found(tmp_path: Path) -> None:
    """The wheel is unpacked by the process itself, with the directory's time unchanged as on a coarse clock."""
    site = tmp_path / "site"
    site.mkdir()
    wheel = tier("acme_late").build(tmp_path)
    code = f"""
import os, zipfile
from polyaccel.offload.tier import Tier
from polyaccel.registry import *
print([info.name for info in list_plugins(PluginGroup.TIERS)])
times = os.stat({str(site)!r})
zipfile.ZipFile({str(wheel)!r}).extractall({str(site)!r})
os.utime({str(site)!r}, ns=(times.st_atime_ns, times.st_mtime_ns))
print(load_plugin(PluginGroup.TIERS, "late", Tier, Tier.API_VERSION).__name__)
"""
    assert python(code, site, cache=tmp_path / "cache").stdout == f"{sorted(OURS)}\nAcmeTier\n"
