"""DeepSpeed's figures of a step under DeepSpeed's names, and the writers that a script opens itself."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import pytest
import torch
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn


def rows(folder: Path) -> dict[str, list[list[str]]]:
    """The rows of each file below `folder`, without its head."""
    return {path.name: list(csv.reader(path.read_text(encoding="utf-8").splitlines()))[1:] for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    deepspeed.comm.destroy_process_group()


def test_figures_have_deepspeed_s_names_and_count_samples(folder: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.0,
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    losses = []
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 3)).square().mean())
        engine.step()
        losses.append(engine.metrics.loss)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Train/own", 3, 8)])
    engine.destroy()
    found = rows(folder / "csv_monitor" / "DeepSpeedJobName")
    assert found["Train_Samples_train_loss.csv"] == [["4", repr(losses[0])], ["8", repr(losses[1])]]
    assert found["Train_Samples_lr.csv"] == [["4", "0.5"], ["8", "0.5"]]
    assert found["Train_own.csv"] == [["8", "3.0"]]
    for phase in ("forward", "backward", "backward_inner", "backward_allreduce", "step"):
        assert [at for at, _ in found[f"Train_Samples_elapsed_time_ms_{phase}.csv"]] == ["4", "8"]
    assert "Train_Samples_loss_scale.csv" not in found  # there is none


def test_a_script_opens_writers_of_its_own(folder: Path) -> None:
    class Sections:
        csv_monitor: ClassVar[dict[str, Any]] = {"enabled": True, "output_path": "out", "job_name": "mine"}

    deepspeed.init_distributed()
    for config in (Sections(), {"csv_monitor": Sections.csv_monitor}):
        master = MonitorMaster(config)
        assert master.enabled
        master.write_events([("eval", 0.5, 10)])
        master._stream.close()
    assert rows(folder / "out" / "mine") == {"eval.csv": [["10", "0.5"]] * 2}
    assert not MonitorMaster({"wandb": {"enabled": False}}).enabled


def test_each_monitor_is_a_writer_of_its_section(folder: Path) -> None:
    deepspeed.init_distributed()
    config = {"train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": "out/", "job_name": "mine"}}
    sections = DeepSpeedConfig(config).monitor_config
    writer = csvMonitor(sections.csv_monitor)
    assert (writer.enabled, writer.output_path, writer.job_name) == (True, "out/", "mine")
    writer.write_events([("Train/own", 3, 8)])
    writer._stream.close()
    assert rows(folder / "out" / "mine") == {"Train_own.csv": [["8", "3.0"]]}
    assert sections.enabled
    assert not DeepSpeedMonitorConfig().enabled
    idle = WandbMonitor(sections.wandb)
    assert (idle.enabled, idle.group, idle.project) == (False, None, "deepspeed")
    assert TensorBoardMonitor(sections.tensorboard).enabled is False
