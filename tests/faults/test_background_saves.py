"""Saves that a process beside the ranks writes: the same bytes, one at a time, every failure told to all ranks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_table import IS_FULL, TABLE, Ends
from faulty_storage import installed_in
from parity_models import make_config, on_threads, parity_loss, parity_model, snapshot

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import FileStorage, TensorPiece, list_checkpoints, open_checkpoint
from polyaccel.checkpoint.save import async_client
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.checkpoint.saver import SavePolicy, Saver
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

pytestmark = pytest.mark.skipif(
    not async_client.can_save_in_background(), reason="this system has no memory without a name"
)
NUMPY = CpuAccelerator("numpy")
NUMEL = 1000


def engine_of(model: Any, stage: int, **changes: Any) -> Any:
    engine, *_ = polyaccel.initialize(model=model, config=make_config(stage, **changes))
    return engine


def step(engine: Any, communicator: Communicator, number: int) -> None:
    engine.backward(parity_loss(engine, number, 0, communicator.rank))
    engine.step()


def files_of(place: Path) -> dict[str, bytes]:
    """The contents of the ranks' files."""
    return {path.name: path.read_bytes() for path in place.glob("*/save-*/rank*")}


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (3, 3)])
def test_what_is_written_is_the_state_when_it_was_saved(world: int, stage: int, tmp_path: Path) -> None:
    """Training goes on while the copy is written, and the copy is that of a save that training waited for."""

    def train(communicator: Communicator, model: Any, folder: Path, background: bool) -> dict[str, Any]:
        engine = engine_of(model, stage, checkpoint={"async": background})
        step(engine, communicator, 0)
        engine.save_checkpoint(str(folder), tag="saved")
        saved = snapshot(engine.module)
        for number in range(1, 4):
            step(engine, communicator, number)
        engine.load_checkpoint(str(folder))
        loaded = snapshot(engine.module)
        assert all((loaded[name] == saved[name]).all() for name in saved)
        engine.destroy()
        return saved

    for background in (True, False):
        on_threads(world, train, parity_model, tmp_path / str(background), background)
    written = files_of(tmp_path / "True")
    assert len(written) == world
    assert written == files_of(tmp_path / "False")


@pytest.fixture(scope="module")
def _faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The storage of `faulty_storage` is installed, for this process and for those that it starts."""
    folder = tmp_path_factory.mktemp("site")
    installed_in(folder)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    jobs = Path(sys.modules["faulty_storage"].__file__ or "").parent
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(jobs)]))
    async_client.stop()  # the next one is started with that path
    yield
    patch.undo()
    async_client.stop()


def save(communicator: Communicator, place: Path, tag: str, value: float, **options: Any) -> None:
    """Save a tensor and other things that all hold `value`, through a storage that fails as `options` say."""
    data = NumpyBuffer(np.full(NUMEL, value, np.float32))
    saver = Saver(communicator, SavePolicy(storage="faulty", options=options), {"value": value})
    try:
        saver.save(
            str(place),
            tag,
            SaveContents(
                lambda: [TensorPiece("w", "param", (2, NUMEL), DType.FLOAT32, NUMEL * communicator.rank, data)],
                {"value": value},
                {"rng": str(value).encode()},
            ),
            save_latest=True,
        )
        data.fill(-1.0)  # it was copied
        saver.wait()
    finally:
        saver.close()


def value_of(place: Path, tag: str | None = None) -> float:
    """The one value that every part of a checkpoint holds."""
    reader = open_checkpoint(FileStorage(place), tag)
    buffer = allocate_numpy(2 * NUMEL, DType.FLOAT32)
    reader.read_into("w", "param", 0, 2 * NUMEL, buffer)
    blobs = [float(reader.rank_blobs(rank)["rng"]) for rank in range(2)]
    (value,) = {*buffer.raw.tolist(), reader.scalars["value"], reader.about["value"], *blobs}
    return float(value)


WRITES = 6  # two files, rank 1's note, the manifest, the marker, `latest`
FAULTS = ("error before", "error after", "kill before", "kill after")
FAILED = Ends(
    "names the rank, on all ranks, at the next step or save", "the old checkpoint, or the new one, whole", code="-"
)
SAMPLE = [("kill before", 0), ("kill after", 1), ("kill before", 4), ("kill after", 4)]


@pytest.mark.usefixtures("_faulty")
@pytest.mark.parametrize(
    ("fault", "at"),
    [
        (fault, at)
        for fault in FAULTS
        for at in range(WRITES)
        if IS_FULL or fault.startswith("error") or (fault, at) in SAMPLE
    ],
)
def test_a_save_that_fails_leaves_the_old_checkpoint_or_the_new_one(fault: str, at: int, tmp_path: Path) -> None:
    """Wherever the process beside the ranks fails or is killed: all ranks hear of it, and nothing is half."""

    def work(communicator: Communicator) -> str:
        for tag in ("old", "t"):
            save(communicator, tmp_path, tag, 1.0)
        with pytest.raises(CheckpointError) as caught:
            save(communicator, tmp_path, "t", 2.0, fault=fault, at=at)
        assert "'t'" in str(caught.value)
        return caught.value.message

    with TABLE.case(f"the process that writes a checkpoint: {fault} one of its writes", FAILED):
        told = run_threads(2, work, accelerator=NUMPY)
        check_failed(told, fault, at, tmp_path)


def check_failed(told: list[str], fault: str, at: int, tmp_path: Path) -> None:
    assert told[0] == told[1]
    # Files and the note may come in another order; an error after the note may be heard of before or after it is read.
    may_be = {1.0, 2.0} if at < 3 and fault == "error after" else {1.0}
    is_committed = at > 4 or (at == 4 and fault.endswith("after"))
    assert value_of(tmp_path, "t") in ({2.0} if is_committed else may_be)
    assert value_of(tmp_path, "old") == 1.0
    assert value_of(tmp_path) == value_of(tmp_path, "t")

    run_threads(2, save, tmp_path, "t", 3.0, accelerator=NUMPY)  # and nothing of it is in the way
    assert value_of(tmp_path) == 3.0
    folders = [path.name for path in (tmp_path / "t").iterdir() if path.is_dir()]
    (left,) = folders
    assert sorted(path.name for path in (tmp_path / "t" / left).iterdir())[:2] == ["manifest.json", "owner.json"]


@pytest.mark.usefixtures("_faulty")
def test_the_next_step_tells_all_ranks_of_a_failure(tmp_path: Path) -> None:
    def train(communicator: Communicator, model: Any) -> None:
        storage = {"faulty": {"fault": "error before", "at": 0, "of": "rank00001"}}
        engine = engine_of(model, 1, checkpoint={"storage": storage, "on_failure": "raise"})
        step(engine, communicator, 0)
        engine.save_checkpoint(str(tmp_path), tag="t")

        def step_on() -> None:
            for number in range(1, 100_000):
                step(engine, communicator, number)

        with pytest.raises(CheckpointError) as caught:
            step_on()
        assert caught.value.value == (0, 1)
        assert all(part in str(caught.value) for part in ("'t'", "t/save", "rank 1"))
        step(engine, communicator, 0)  # training may go on
        engine.destroy()

    on_threads(2, train, parity_model)
    assert not any(status.is_good for status in list_checkpoints(tmp_path))


@pytest.mark.usefixtures("_faulty")
def test_the_end_of_an_engine_names_the_rank_that_failed(tmp_path: Path) -> None:
    """A rank that closes asks no other rank, so what it raises is about itself."""

    def train(communicator: Communicator, model: Any) -> None:
        config = {"async": True, "storage": {"faulty": {"fault": "error before", "at": 0, "of": "rank00001"}}}
        engine = engine_of(model, 1, checkpoint=config)
        step(engine, communicator, 0)
        engine.save_checkpoint(str(tmp_path), tag="t")
        with pytest.raises(CheckpointError) as caught:
            engine.destroy()
        assert caught.value.value == (communicator.rank,)

    on_threads(2, train, parity_model)


@pytest.mark.usefixtures("_faulty")
def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    """At most one is in memory. The first lasts until the second is asked for, by another thread."""

    def work(communicator: Communicator) -> None:
        go = tmp_path / "go"
        saver = Saver(communicator, SavePolicy(storage="faulty", options={"lasts": "one/", "until": str(go)}), {})
        for tag in ("one", "two"):
            data = NumpyBuffer(np.full(NUMEL, 1.0, np.float32))
            if tag == "two":
                saver.poll()  # under way
                assert list_names(tmp_path / "saved") == []
                go.touch()
            saver.save(
                str(tmp_path / "saved"),
                tag,
                SaveContents(lambda data=data: [TensorPiece("w", "param", (NUMEL,), DType.FLOAT32, 0, data)], {}, {}),
                save_latest=True,
            )
            if tag == "two":
                assert "commit.json" in list_names(tmp_path / "saved" / "one")
        saver.wait()
        saver.close()

    run_threads(1, work, accelerator=NUMPY)
    assert {status.tag for status in list_checkpoints(tmp_path / "saved")} == {"one", "two"}


def list_names(folder: Path) -> list[str]:
    """Committed files of a folder of a tag, or tags."""
    return [path.name for path in folder.rglob("commit.json")] if folder.exists() else []


def test_what_does_not_fit_is_written_while_training_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(communicator: Communicator, model: Any) -> None:
        engine = engine_of(model, 1, checkpoint={"staging_memory": 1000})
        step(engine, communicator, 0)
        for tag in ("one", "two"):
            engine.save_checkpoint(str(tmp_path), tag=tag)
            assert (tmp_path / tag / "commit.json").exists()
        engine.destroy()

    with caplog.at_level(logging.WARNING):
        on_threads(2, train, parity_model)
    assert caplog.text.count("checkpoints are written while training waits: rank 0 would stage") == 1


def test_a_process_that_is_killed_is_told_of_and_started_again(tmp_path: Path) -> None:
    def train(communicator: Communicator, model: Any) -> None:
        engine = engine_of(model, 0)
        step(engine, communicator, 0)
        beside = async_client._process().pid
        os.kill(beside, signal.SIGSTOP)
        engine.save_checkpoint(str(tmp_path), tag="lost")
        os.kill(beside, signal.SIGKILL)
        with pytest.raises(CheckpointError) as caught:
            engine.wait_for_checkpoint()
        assert caught.value.value == (0,)
        engine.save_checkpoint(str(tmp_path), tag="kept")
        engine.destroy()

    on_threads(1, train, parity_model)
    assert [status.tag for status in list_checkpoints(tmp_path) if status.is_good] == ["kept"]


@pytest.mark.parametrize("on_failure", ["log", "raise"])
def test_a_process_that_is_stopped_is_waited_for_no_longer_than_the_limit(
    on_failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(communicator: Communicator, model: Any) -> None:
        engine = engine_of(model, 0, checkpoint={"timeout_s": 600.0, "on_failure": on_failure})
        step(engine, communicator, 0)
        stopped = async_client._process().pid
        os.kill(stopped, signal.SIGSTOP)
        engine.save_checkpoint(str(tmp_path), tag="lost")
        pending = engine._saver._under_way.pending
        assert pending.limit_s == 600.0
        pending.limit_s = 0.5  # not that of the save's preparation, in which this process may stand still
        if on_failure == "raise":
            with pytest.raises(CheckpointError) as caught:
                engine.save_checkpoint(str(tmp_path), tag="kept")
            assert caught.value.value == (0,)
        step(engine, communicator, 1)
        engine.save_checkpoint(str(tmp_path), tag="kept")
        assert async_client._process().pid != stopped
        engine.destroy()

    with caplog.at_level(logging.ERROR):
        on_threads(1, train, parity_model)
    assert [status.tag for status in list_checkpoints(tmp_path) if status.is_good] == ["kept"]
    assert [record.name for record in caplog.records] == ["polyaccel.checkpoint.saver"] * (on_failure == "log")


SCRIPT = """
import sys, torch, polyaccel
model = torch.nn.Linear(4, 1)
config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "checkpoint": eval(sys.argv[2])}
engine, *_ = polyaccel.initialize(model=model, config=config)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1], tag="last")
"""


def test_a_script_that_ends_right_after_a_save_has_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "{}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [status.is_good for status in list_checkpoints(tmp_path)] == [True]


@pytest.mark.usefixtures("_faulty")
def test_a_script_that_ends_right_after_a_save_tells_that_it_failed(tmp_path: Path) -> None:
    options = {"storage": {"faulty": {"fault": "error before", "at": 0, "of": "manifest"}}}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), repr(options)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "a checkpoint was not saved: last/save-" in done.stderr
    assert list_checkpoints(tmp_path) == () or not list_checkpoints(tmp_path)[0].is_good
