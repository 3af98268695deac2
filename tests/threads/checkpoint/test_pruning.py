"""Old checkpoints go after a save, in an order that leaves whole ones or none; the config's keys do it in an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.checkpoint import FileStorage, TensorPiece, list_checkpoints, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.format.commit import LATEST, write_latest
from polyaccel.checkpoint.format.save_folders import new_folder, own_save
from polyaccel.checkpoint.retention import KEEP_ALL, KeepBest, Retention, prune
from polyaccel.checkpoint.storage.owner import ProcessIdentity
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

NUMPY = CpuAccelerator("numpy")


@pytest.fixture(autouse=True)
def _power_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, and not the machine: what was written is there without a wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


class Crash(BaseException):
    """The process dies here: nobody catches this."""


def save(
    storage: FileStorage, step: int, *, retention: Retention = KEEP_ALL, value: float = 1.0, **options: Any
) -> None:
    def work(communicator: Communicator) -> None:
        data = NumpyBuffer(np.full(4, value, np.float32))
        save_checkpoint(
            storage,
            f"t{step:03}",
            communicator=communicator,
            pieces=[TensorPiece("w", "param", (8,), DType.FLOAT32, 4 * communicator.rank, data)],
            scalars={"counters": {"global_steps": step}, "client_state": options.pop("client_state", {})},
            rank_blobs={},
            retention=retention,
            **options,
        )

    run_threads(2, work, accelerator=NUMPY)


def tags(place: Path) -> list[str]:
    assert not [status for status in list_checkpoints(place) if status.problem]
    return sorted(status.tag for status in list_checkpoints(place))


def test_a_run_keeps_the_last_the_round_and_the_best(tmp_path: Path) -> None:
    rule = Retention(keep_last=2, keep_every=5, keep_best=KeepBest("eval.loss", count=2))
    losses = [9.0, 3.0, 8.0, 1.0, 7.0, 2.0, 6.0, 5.0, 4.0, 3.5, 3.2]
    for step, loss in enumerate(losses, start=1):
        save(FileStorage(tmp_path), step, retention=rule, client_state={"eval": {"loss": loss}})
    assert tags(tmp_path) == ["t004", "t005", "t006", "t010", "t011"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, *tags(tmp_path)]
    assert open_checkpoint(tmp_path).tag == "t011"


def test_no_metric_means_that_all_stay_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = Retention(keep_last=1, keep_best=KeepBest("eval.acuracy", "max"))
    for step in (1, 2, 3):
        save(FileStorage(tmp_path), step, retention=rule, client_state={"eval": {"accuracy": 0.5}})
    assert tags(tmp_path) == ["t001", "t002", "t003"]
    assert "has the number 'eval.acuracy' of \"checkpoint.keep_best\"" in caplog.text


def test_the_tag_that_latest_names_stays(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    save(storage, 1)
    for step in (2, 3, 4):
        save(storage, step, retention=Retention(keep_last=2), save_latest=False)
    assert tags(tmp_path) == ["t001", "t003", "t004"]


def test_a_pointer_that_cannot_be_read_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = FileStorage(tmp_path)
    for step in (1, 2):
        save(storage, step)
    storage.write(LATEST, [b"../../elsewhere"])
    assert prune(storage, Retention(keep_last=1)) == ()
    assert "could not delete old checkpoints" in caplog.text
    assert tags(tmp_path) == ["t001", "t002"]


def test_a_checkpoint_that_was_damaged_since_does_not_count_as_kept(tmp_path: Path) -> None:
    """Also where this very process had read it before."""
    storage = FileStorage(tmp_path)
    for step in (1, 2, 3):
        save(storage, step, retention=Retention(keep_last=3))
    (manifest,) = tmp_path.glob("t003/*/manifest.json")
    manifest.unlink()
    assert prune(storage, Retention(keep_last=1)) == ("t001",)
    assert open_checkpoint(tmp_path, "t002").tag == "t002"
    assert (tmp_path / "t003" / "commit.json").exists()


def test_weights_that_are_not_finite_go_once_the_run_has_recovered(tmp_path: Path) -> None:
    storage, rule = FileStorage(tmp_path), Retention(keep_last=2)
    save(storage, 1, retention=rule)
    save(storage, 2, retention=rule, value=float("nan"))
    assert tags(tmp_path) == ["t001", "t002"]
    save(storage, 3, retention=rule)
    assert tags(tmp_path) == ["t001", "t003"]


def test_a_tag_that_somebody_is_saving_again_stays(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    for step in (1, 2, 3):
        save(storage, step)
    with ExitStack() as owned:
        own_save(owned, storage, "t001", new_folder(storage, "t001"), ProcessIdentity.me())
        assert prune(storage, Retention(keep_last=1)) == ("t002",)
    assert tags(tmp_path) == ["t001", "t003"]


def test_a_tag_that_is_replaced_between_the_look_and_the_deletion_stays(tmp_path: Path) -> None:
    class Overtaken(FileStorage):
        def read(self, path: str, offset: int, nbytes: int) -> bytes:
            if path == LATEST:  # read after every tag was looked at
                save(FileStorage(tmp_path), 1, value=2.0, save_latest=False)
            return super().read(path, offset, nbytes)

    for step in (1, 2, 3):
        save(FileStorage(tmp_path), step)
    assert prune(Overtaken(tmp_path), Retention(keep_last=1)) == ("t002",)
    assert tags(tmp_path) == ["t001", "t003"]


def test_strangers_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "runs" / "logs").mkdir(parents=True)
    (tmp_path / "runs" / "logs" / "loss.csv").write_text("1")
    for step in (1, 2):
        save(FileStorage(tmp_path), step, retention=Retention(keep_last=1))
    assert (tmp_path / "runs" / "logs" / "loss.csv").exists()
    assert not (tmp_path / "t001").exists()


class Dying(FileStorage):
    """A FileStorage whose process dies before or after call number `at`, or inside of a deletion of a folder."""

    def __init__(self, place: Path, at: int, when: str) -> None:
        super().__init__(place)
        self.at, self.when, self.calls = at, when, 0

    def _call(self, method: Callable[[str], None], path: str) -> None:
        self.calls += 1
        if self.calls - 1 != self.at:
            method(path)
            return
        files = [file for file in Path(self.location, path).rglob("*") if file.is_file()]
        if self.when == "inside" and files:
            files[0].unlink()
        elif self.when == "after":
            method(path)
        raise Crash

    def delete(self, path: str) -> None:
        self._call(super().delete, path)

    def delete_tree(self, path: str) -> None:
        self._call(super().delete_tree, path)

    def clear_unfinished(self, path: str = "", *, if_empty: bool = False) -> None:
        self._call(lambda path: FileStorage.clear_unfinished(self, path, if_empty=if_empty), path)


@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("at", range(6))
def test_a_deletion_that_is_cut_short_leaves_whole_checkpoints_and_is_finished_later(
    tmp_path: Path, at: int, when: str
) -> None:
    """Two tags go, by three calls each. At most an empty folder is left: whose it is, nobody can tell."""
    for step in (1, 2, 3):
        save(FileStorage(tmp_path), step)
    dying = Dying(tmp_path, at, when)
    with pytest.raises(Crash):
        prune(dying, Retention(keep_last=1))
    assert dying.calls == at + 1
    for status in list_checkpoints(tmp_path):
        assert not status.problem or "no commit marker" in status.problem or "does not exist" in status.problem
        if not status.problem:
            open_checkpoint(tmp_path, status.tag).verify("w", "param", 0, 8, DType.FLOAT32)
    assert open_checkpoint(tmp_path).tag == "t003"
    save(FileStorage(tmp_path), 4, retention=Retention(keep_last=1))
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()} == {LATEST, "t004"}


def test_what_cannot_be_deleted_is_said_and_the_save_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(storage: FileStorage, path: str) -> None:
        raise CheckpointError(f"cannot delete {path}", hint="")

    save(FileStorage(tmp_path), 1)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(FileStorage, "delete", refuse)
        save(FileStorage(tmp_path), 2, retention=Retention(keep_last=1))
    assert tags(tmp_path) == ["t001", "t002"]
    assert "could not delete old checkpoints" in caplog.text


def test_a_storage_that_does_not_delete_files_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Old(FileStorage):
        def delete(self, path: str) -> None:
            """As the default does over a `delete_tree` that knows folders only."""

    for step in (1, 2):
        save(FileStorage(tmp_path), step)
    assert prune(Old(tmp_path), Retention(keep_last=1)) == ()
    assert "did not delete t001/commit.json" in caplog.text
    assert tags(tmp_path) == ["t001", "t002"]


def test_an_engine_obeys_its_config(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import polyaccel

    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "checkpoint": {"keep_last": 1, "keep_every": 3, "keep_best": {"metric": "loss"}},
    }
    engine, *_ = polyaccel.initialize(model=torch.nn.Linear(2, 1), config=config)
    for loss in (5, 4, 6, 7, 8):
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path), client_state={"loss": loss, "where": torch.ones(2)})
    engine.wait_for_checkpoint()
    assert tags(tmp_path) == ["global_step2", "global_step3", "global_step5"]
    engine.destroy()


def test_latest_may_be_moved_by_hand(tmp_path: Path) -> None:
    """A script that goes back to an older tag keeps it by saying so."""
    storage = FileStorage(tmp_path)
    for step in (1, 2):
        save(storage, step)
    write_latest(storage, "t001")
    assert prune(storage, Retention(keep_last=1)) == ()
