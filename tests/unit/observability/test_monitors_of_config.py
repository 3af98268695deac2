"""Which monitors a config opens, what they write, and what is said of those that cannot be opened."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from polyaccel.config import load_resolved
from polyaccel.config.sections.monitors import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from polyaccel.core.install_line import install_line
from polyaccel.engine.policies.watching import monitors_of
from polyaccel.errors import ConfigError
from polyaccel.observability.metrics import StepMetrics
from polyaccel.observability.monitors.comet import CometMonitor
from polyaccel.observability.monitors.csv_files import CsvMonitor
from polyaccel.observability.monitors.tensorboard import TensorBoardMonitor
from polyaccel.observability.monitors.wandb import WandbMonitor
from polyaccel.observability.setup import ChosenMonitor, start_monitoring
from polyaccel.testkit.monitor import MonitorContract
from polyaccel.testkit.ranks.threads import run_threads

SECTIONS = {
    "tensorboard": (TensorBoardConfig, TensorBoardMonitor, {"output_path": "out", "job_name": "job"}),
    "csv_monitor": (CsvMonitorConfig, CsvMonitor, {"output_path": "out", "job_name": "job"}),
    "wandb": (WandbConfig, WandbMonitor, {"project": "p", "group": "g", "team": "t"}),
    "comet": (CometConfig, CometMonitor, {"project": "p", "online": False, "samples_log_interval": 5, "mode": "get"}),
}


class TestCsv(MonitorContract):
    def make(self) -> CsvMonitor:
        return CsvMonitor()


def chosen(**config: Any) -> list[ChosenMonitor]:
    return monitors_of(load_resolved({"train_batch_size": 1, **config}, world_size=1))


@pytest.mark.parametrize("key", SECTIONS)
def test_a_section_that_is_on_opens_its_monitor_with_its_options(key: str) -> None:
    section, monitor, options = SECTIONS[key]
    assert section.plugin == monitor.name
    assert chosen(**{key: options}) == []
    assert chosen(**{key: {"enabled": True, **options}}) == [ChosenMonitor(monitor.name, key, options)]
    assert set(section.model_fields) - {"enabled"} == set(monitor._KINDS)


def test_a_run_folder_has_json_lines() -> None:
    jsonl = ChosenMonitor("jsonl", "monitors.jsonl", {})
    assert chosen() == []
    assert chosen(run_dir="here") == [jsonl]
    assert chosen(run_dir="here", monitors={"jsonl": {}}) == [jsonl]
    with pytest.raises(ConfigError) as caught:
        chosen(monitors={"csv": {}}, csv_monitor={"enabled": True})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("csv_monitor.enabled", True)]
    assert "monitors.csv" in str(caught.value)


def test_a_key_of_an_account_is_shown_to_nobody() -> None:
    config = load_resolved({"train_batch_size": 1, "comet": {"api_key": "s3cret"}}, world_size=1)
    assert "s3cret" not in config.to_json(secrets=False) + json.dumps(config.public_tree())
    assert "s3cret" in config.to_json()


def test_rank_0_writes_the_run_and_its_figures(tmp_path: Path) -> None:
    """A folder that does not exist yet; two monitors; no figure on rank 1."""
    folder = tmp_path / "runs" / "first"
    wanted = chosen(run_dir=str(folder), csv_monitor={"enabled": True})

    def body(communicator: Any) -> bool:
        stream = start_monitoring(communicator, str(folder), wanted, {"packages": {}})
        stream.write(StepMetrics(step=1, loss=2.0, lr=(0.1, 0.2), phase_s={"forward": 0.5}))
        stream.write_events([("eval/a b", 0.25, 7), ("eval_a_b", 0.75, 8)])
        enabled = stream.enabled
        stream.close()
        return enabled

    assert run_threads(2, body) == [True, False]
    assert json.loads((folder / "run.json").read_text())["ranks"] == 2
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 7, 8]
    written = {path.name: list(csv.reader(path.read_text().splitlines())) for path in (folder / "csv").iterdir()}
    assert written["lr_1.csv"] == [["step", "lr_1"], ["1", "0.2"]]
    assert written["phase_s_forward.csv"] == [["step", "phase_s/forward"], ["1", "0.5"]]
    assert [written["eval_a_b.csv"][0][1], written["eval_a_b-2.csv"][0][1]] == ["eval/a b", "eval_a_b"]


def test_what_cannot_be_opened_is_told_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("tensorboard", "wandb", "comet_ml"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "taken").write_text("")
    on = {"enabled": True}
    wanted = chosen(tensorboard=on, wandb=on, comet={**on, "api_key": "s3cret"}, monitors={"csv": {"indent": 1}})
    taken = [ChosenMonitor("csv", "csv_monitor", {"output_path": str(tmp_path / "taken")})]

    def body(communicator: Any) -> tuple[str, str]:
        said = []
        for folder, monitors in ((None, [*wanted, *taken]), (str(tmp_path / "taken" / "run"), wanted)):
            with pytest.raises(ConfigError) as caught:
                start_monitoring(communicator, folder, monitors, {})
            said.append(str(caught.value))
        return said[0], said[1]

    first, second = run_threads(2, body)
    assert first == second
    for told in (
        'tensorboard = "tensorboard.summary.writer.event_file_writer": cannot be imported',
        install_line("wandb"),
        'comet = "comet_ml": cannot be imported',
        "monitors.csv.indent = 1: is not an option",
        "csv_monitor = ",
    ):
        assert told in first[0]
    assert "s3cret" not in first[0]
    assert "run_dir = " in first[1]
