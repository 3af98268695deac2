"""What monitors wrote, read back by the libraries that they write by (`make test-monitors` has them), all offline."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("tensorboard", reason="make test-monitors has it")
pytest.importorskip("wandb", reason="make test-monitors has it")
pytest.importorskip("comet_ml", reason="make test-monitors has it")

import torch
from polyaccel_mlflow.monitor import MlflowMonitor

import polyaccel
from polyaccel.observability.metrics import Monitor
from polyaccel.observability.monitors.comet import CometMonitor
from polyaccel.observability.monitors.tensorboard import TensorBoardMonitor
from polyaccel.observability.monitors.wandb import WandbMonitor
from polyaccel.testkit.monitor import MonitorContract

Row = tuple[str, float | None, int]
_BLOCK = 1 << 15
pytestmark = [  # sockets that Comet leaves to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", "")
    monkeypatch.setenv("COMET_API_KEY", "none")


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: LevelDB's log behind a header of 7 bytes. The library has a reader of
    it, without a door in Python."""
    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if at % _BLOCK > _BLOCK - 7:  # too little is left of the block for a head
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


def of_wandb(folder: Path) -> Iterator[Row]:
    """The figures of every offline run below `folder`, by the library's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.rglob("run-*.wandb")):
        for data in records_of(path):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for tag, value in row.items():
                if tag != "step" and not tag.startswith("_"):
                    yield tag, float(value), row["step"]


def of_comet(folder: Path) -> Iterator[Row]:
    """The figures in the archives of offline experiments."""
    for path in sorted(folder.rglob("*.zip")):
        with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
            for line in lines:
                message = json.loads(line)
                payload = message.get("payload", {})
                metric = payload.get("metric")
                if metric and not metric["metricName"].startswith("sys."):
                    yield metric["metricName"], float(metric["metricValue"]), metric["step"]


class TestTensorBoard(MonitorContract):
    def make(self) -> Monitor:
        return TensorBoardMonitor()


class ReadableWandb(WandbMonitor):
    def read(self, directory: Path, options: Mapping[str, Any]) -> Iterable[Row]:
        return of_wandb(directory)


class TestWandb(MonitorContract):
    def make(self) -> Monitor:
        return ReadableWandb()


class ReadableComet(CometMonitor):
    def read(self, directory: Path, options: Mapping[str, Any]) -> Iterable[Row]:
        return of_comet(directory)


class TestComet(MonitorContract):
    options: ClassVar[Mapping[str, Any]] = {"online": False}

    def make(self) -> Monitor:
        return ReadableComet()


def test_one_training_is_in_all_of_them(tmp_path: Path) -> None:
    """By the config's own sections, and a plugin that polyaccel does not know; the same losses everywhere."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "run_dir": str(tmp_path),
        "tensorboard": {"enabled": True},
        "csv_monitor": {"enabled": True},
        "wandb": {"enabled": True, "project": "polyaccel-tests"},
        "comet": {"enabled": True, "online": False, "project": "polyaccel-tests"},
        "monitors": {"mlflow": {"experiment": "polyaccel-tests"}},
    }
    engine, *_ = polyaccel.initialize(model=torch.nn.Linear(4, 2), config=config)
    losses = {}
    for _ in range(12):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        losses[engine.global_steps] = engine.metrics.loss
        engine.monitor.write_events([("own/accuracy", 1 / engine.global_steps, engine.global_steps)])
    engine.destroy()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Iterable[Row]] = {
        "jsonl": [(line.get("tag", "loss"), line.get("value", line.get("loss")), line["step"]) for line in lines],
        "tensorboard": TensorBoardMonitor().read(tmp_path, {}),
        "wandb": of_wandb(tmp_path / "wandb"),
        "comet": of_comet(tmp_path),
        "mlflow": MlflowMonitor().read(tmp_path, {"experiment": "polyaccel-tests"}),
    }
    for library, rows in found.items():
        table: dict[str, dict[int, float | None]] = {}
        for tag, value, step in rows:
            table.setdefault(tag, {})[step] = value
        assert table["loss"].keys() == losses.keys(), library
        assert all(math.isclose(table["loss"][step] or 0, loss, rel_tol=1e-6) for step, loss in losses.items()), library
        assert all(math.isclose(value or 0, 1 / step, rel_tol=1e-6) for step, value in table["own/accuracy"].items())
        assert len(table["own/accuracy"]) == 12, library
