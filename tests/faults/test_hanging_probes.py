"""A plugin that does not answer is cut at a limit and named, where a job starts and where all plugins are asked."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fault_table import TABLE, Ends

from polyaccel.accelerators import detect
from polyaccel.accelerators.detect import choose_accelerator
from polyaccel.accelerators.mps import MpsAccelerator
from polyaccel.cli.doctor import command as doctor
from polyaccel.comm.init.setup import init_distributed
from polyaccel.core.types import Probe
from polyaccel.errors import PluginContractError
from polyaccel.registry import PluginGroup, PluginInfo, find_plugin, probe_all, probe_plugin, probing

LIMIT_S = 0.2
IMPORT_S = 5.0
"""In which a busy machine imports a file to the line that hangs."""
ENDING = Ends("names the plugin, its package and the line where it waits", "the next best device", "at the limit")


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin `mps` does not answer until the test is over."""
    over = Event()

    def hang(cls: type[Any]) -> Probe:
        over.wait()
        return Probe(False, "late")

    monkeypatch.setattr(MpsAccelerator, "probe", classmethod(hang))
    for variable in detect.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(detect, "_chosen", None)
    yield
    over.set()


def said(limit_s: float) -> str:
    return rf"accelerator 'mps' \(package polyaccel \S+\): probing it has not ended after {limit_s:g} s, in \S+:\d+"


def ways_to_ask() -> dict[str, Callable[[], object]]:
    mps = find_plugin(PluginGroup.ACCELERATORS, "mps")
    alone = {"rank": 0, "world_size": 1, "dist_backend": "local", "config": {"accelerator": "mps"}}
    return {
        "probe_plugin": lambda: probe_plugin(mps, MpsAccelerator, limit_s=LIMIT_S),
        "choose_accelerator": lambda: choose_accelerator("mps", limit_s=LIMIT_S),
        "init_distributed": lambda: init_distributed(timeout=2 * LIMIT_S, **alone),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("way", sorted(ways_to_ask()))
def test_a_named_plugin_that_does_not_answer_is_an_error_that_names_it(hanging: None, way: str) -> None:
    with (
        TABLE.case("a probe that hangs", ENDING),
        pytest.raises(PluginContractError) as caught,
    ):
        ways_to_ask()[way]()
    assert caught.value.value == "polyaccel.accelerators.mps:MpsAccelerator"
    assert f"{LIMIT_S:g}" in str(caught.value)


def test_a_plugin_that_does_not_answer_is_left_out_with_a_warning(
    hanging: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only for the one that hangs time is short: the others have all that they need on a busy machine."""
    in_time = probing._in_time

    def short(info: PluginInfo, doing: str, action: Callable[[], Any], limit_s: float) -> Any:
        return in_time(info, doing, action, LIMIT_S if (info.name, doing) == ("mps", "probing") else limit_s)

    monkeypatch.setattr(probing, "_in_time", short)
    with TABLE.case("a probe that hangs", ENDING), caplog.at_level(logging.WARNING):
        assert choose_accelerator().name == "cpu"
        assert "an accelerator is left out: accelerator 'mps'" in caplog.text


def test_the_doctor_says_which_plugin_does_not_answer(hanging: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATIENCE_S", LIMIT_S)
    with TABLE.case("a probe that hangs", ENDING):
        rows = doctor.as_json(doctor.examine())["plugins"]
        (row,) = (row for row in rows if row["name"] == "mps")
        assert row["state"] == "broken"
        assert f"has not ended after {LIMIT_S:g} s" in row["reason"]
        assert "over.wait()" in row["traceback"]


def install(place: Path, group: str, source: str) -> None:
    """A distribution `hangs` 1.5 with a plugin of this name."""
    info = place / "hangs-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hangs\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[polyaccel.{group}]\nhangs = hangs_here:Hangs\n")
    (place / "hangs_here.py").write_text(source)


def test_an_import_that_hangs_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "monitors", "import os\nos.read(int(os.environ['HANGS_ON']), 1)\n")
    read, write = os.pipe()
    monkeypatch.setenv("HANGS_ON", str(read))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with TABLE.case("an import that hangs", ENDING):
            rows = probe_all(PluginGroup.MONITORS, object, (1, 0), limit_s=IMPORT_S)
            (row,) = (row for row in rows if row.info.name == "hangs")
            assert f"importing it has not ended after {IMPORT_S:g} s, in {tmp_path}" in row.reason
            assert "os.read" in row.traceback
    finally:
        os.write(write, b"x")
        sys.modules.pop("hangs_here", None)
