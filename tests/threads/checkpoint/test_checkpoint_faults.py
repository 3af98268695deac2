"""Whatever goes wrong during a save, on whichever rank and at whichever step, a whole checkpoint remains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import numpy as np
import pytest

from polyaccel.accelerators.base import Probe
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import Commit, FileStorage, Storage, TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.format.save_folders import save_folders
from polyaccel.comm.backends.local.backend import LocalWorld
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, CommError, CommTimeout
from polyaccel.testkit.ranks.threads import run_threads

NUMPY = CpuAccelerator("numpy")
Fault = Literal["crash before", "crash midway", "crash after", "error before", "error after"]


@pytest.fixture(autouse=True)
def _power_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, and not the machine: what was written is there without a wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


class Crash(BaseException):
    """The process dies here: nobody catches this."""


class FaultyStorage(Storage):
    """A FileStorage whose `at`-th call on rank `rank` goes wrong; `calls` counts that rank's calls."""

    name = "faulty"

    def __init__(self, inner: FileStorage, fault: Fault, at: int) -> None:
        super().__init__(inner.location)
        self.inner, self.fault, self.at, self.calls = inner, fault, at, 0

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="for tests")

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        hit = self.calls == self.at
        self.calls += 1
        if hit and self.fault == "crash before":
            raise Crash
        if hit and self.fault == "error before":
            raise CheckpointError("the disk is on fire", hint="pour water on it")
        result = method(*args)
        if hit and self.fault == "crash after":
            raise Crash
        if hit and self.fault == "error after":
            raise CheckpointError("the disk is on fire", hint="pour water on it")
        return result

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.calls == self.at and self.fault == "crash midway":
            half = b"".join(chunks)
            place = Path(self.inner.location, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.with_name(f".{place.name}.tmp").write_bytes(half[: len(half) // 2])
            raise Crash
        self._call(self.inner.write, path, chunks)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        return self._call(self.inner.read, path, offset, nbytes)  # type: ignore[no-any-return]

    def size(self, path: str) -> int | None:
        return self._call(self.inner.size, path)  # type: ignore[no-any-return]

    def names(self, path: str = "") -> tuple[str, ...]:
        return self._call(self.inner.names, path)  # type: ignore[no-any-return]

    def delete_tree(self, path: str) -> None:
        self._call(self.inner.delete_tree, path)

    def check_space(self, nbytes: int) -> None:
        self._call(self.inner.check_space, nbytes)


def save(communicator: Communicator, storages: list[Storage], tag: str, value: float, **options: Any) -> Commit:
    """Save a tensor of 20 elements `value`, ten on each of two ranks, or all on one."""
    numel = 20 // communicator.world_size
    data = NumpyBuffer(np.full(numel, value, dtype=np.float32))
    return save_checkpoint(
        storages[communicator.rank],
        tag,
        communicator=communicator,
        pieces=[TensorPiece("w", "param", (4, 5), DType.FLOAT32, communicator.rank * numel, data)],
        scalars={"value": value},
        rank_blobs={"rng": str(value).encode()},
        **options,
    )


def value_of(storage: Storage, tag: str | None = None) -> float:
    """The one value that every part of a checkpoint holds."""
    reader = open_checkpoint(storage, tag)
    buffer = allocate_numpy(20, DType.FLOAT32)
    reader.read_into("w", "param", 0, 20, buffer)
    blobs = [float(reader.rank_blobs(rank)["rng"]) for rank in range(reader.world_size)]
    (value,) = {*buffer.raw.tolist(), reader.scalars["value"], *blobs}
    return float(value)


def steps_of_a_save(world_size: int, place: Path) -> list[int]:
    """How many storage calls each rank makes when it overwrites a tag."""
    plain = FileStorage(place)
    storages = [FaultyStorage(plain, "error after", at=-1) for _ in range(world_size)]
    run_threads(world_size, save, [plain] * world_size, "t", 1.0, accelerator=NUMPY)
    run_threads(world_size, save, storages, "t", 2.0, accelerator=NUMPY)
    return [storage.calls for storage in storages]


def faults(world_size: int, tmp_path: Path, kinds: Iterable[Fault]) -> Iterator[tuple[FileStorage, list[Storage], str]]:
    """Every fault at every storage call of every rank, each over a fresh directory with `old` and `t`, both 1.0."""
    for rank, calls in enumerate(steps_of_a_save(world_size, tmp_path / "count")):
        assert calls >= 1
        for at in range(calls):
            for fault in kinds:
                name = f"{fault} call {at} of rank {rank}"
                plain = FileStorage(tmp_path / name.replace(" ", "-"))
                for tag in ("old", "t"):
                    run_threads(world_size, save, [plain] * world_size, tag, 1.0, accelerator=NUMPY)
                storages: list[Storage] = [plain] * world_size
                storages[rank] = FaultyStorage(plain, fault, at)
                yield plain, storages, name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tag", ["t", "new"])
def test_a_crash_at_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, world_size: int, tag: str) -> None:
    outcomes = set()
    for plain, storages, name in faults(world_size, tmp_path, ["crash before", "crash midway", "crash after"]):
        try:
            run_threads(world_size, save, storages, tag, 2.0, accelerator=NUMPY)
        except Crash:
            value = value_of(plain)
            outcomes.add(value)
            assert value in (1.0, 2.0), name
            assert value_of(plain, "old") == 1.0, name
        # Nothing that the crash left lying about stands in the way of the next save, which clears it away.
        run_threads(world_size, save, [plain] * world_size, tag, 3.0, accelerator=NUMPY)
        assert value_of(plain) == value_of(plain, tag) == 3.0, name
        assert len(save_folders(plain, tag)) == 1, name
    assert outcomes == {1.0, 2.0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failure_on_any_rank_is_an_error_on_all_and_loses_nothing(tmp_path: Path, world_size: int) -> None:
    def save_and_tell(communicator: Communicator, storages: list[Storage]) -> str:
        try:
            save(communicator, storages, "t", 2.0)
        except CheckpointError as error:
            return str(error)
        return ""

    failures = 0
    for plain, storages, name in faults(world_size, tmp_path, ["error before", "error after"]):
        told = run_threads(world_size, save_and_tell, storages, accelerator=NUMPY)
        assert len(set(told)) == 1, (name, told)
        failures += bool(told[0])
        assert not told[0] or ("the disk is on fire" in told[0] and "hint: pour water on it" in told[0]), name
        value = value_of(plain)
        assert value == 2.0 if not told[0] else value in (1.0, 2.0), name
        assert value_of(plain, "old") == 1.0, name
    assert failures >= 6 * world_size


def test_a_failed_write_frees_its_room_and_leaves_the_tag_as_it_was(tmp_path: Path) -> None:
    plain = FileStorage(tmp_path)
    run_threads(2, save, [plain] * 2, "t", 1.0, accelerator=NUMPY)
    broken = FaultyStorage(plain, "error before", at=0)  # the only thing that rank 1 does is to write its file
    with pytest.raises(CheckpointError) as caught:
        run_threads(2, save, [plain, broken], "t", 2.0, accelerator=NUMPY)
    assert caught.value.value == (1,)
    assert all(part in str(caught.value) for part in ("'t'", "rank 1"))
    assert value_of(plain) == 1.0
    (folder,) = save_folders(plain, "t")
    assert folder.startswith("save-0001-")


def test_a_marker_that_took_effect_keeps_its_files(tmp_path: Path) -> None:
    """The directory's fsync can fail after the marker was replaced: then the new save is the one that counts."""

    class LateError(FileStorage):
        def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
            super().write(path, chunks)
            if path.endswith("commit.json"):
                raise CheckpointError("fsync of the directory failed", hint="look at the disk")

    run_threads(1, save, [FileStorage(tmp_path)], "t", 1.0, accelerator=NUMPY)
    with pytest.raises(CheckpointError) as caught:
        run_threads(1, save, [LateError(tmp_path)], "t", 2.0, accelerator=NUMPY)
    assert caught.value.value == (0,)
    assert all(part in str(caught.value) for part in ("'t'", "rank 0"))
    assert value_of(FileStorage(tmp_path), "t") == 2.0


def test_saving_on_rank_0_only_is_detected(tmp_path: Path) -> None:
    world = LocalWorld(2, NUMPY, timeout_s=0.2)
    with pytest.raises(CommTimeout) as caught:
        save(world.communicators[0], [FileStorage(tmp_path)] * 2, "t", 1.0)
    assert "save_checkpoint must be called on every rank" in caught.value.hint
    assert caught.value.missing_ranks == (1,)
    assert FileStorage(tmp_path).names() == ()


def test_saving_while_another_rank_goes_on_training_is_detected(tmp_path: Path) -> None:
    world = LocalWorld(2, NUMPY, timeout_s=20)
    failures: list[Exception] = []

    def train() -> None:
        try:
            world.communicators[1].all_reduce(allocate_numpy(4, DType.FLOAT32))
        except CommError as error:
            failures.append(error)

    trainer = Thread(target=train)
    trainer.start()
    with pytest.raises(CommError) as caught:
        save(world.communicators[0], [FileStorage(tmp_path)] * 2, "t", 1.0)
    assert "save_checkpoint" in str(caught.value)
    trainer.join(20)
    assert "must be called on every rank" in caught.value.hint
    assert len(failures) == 1


def save_own_tag(communicator: Communicator, storages: list[Storage], validation: str) -> Commit:
    return save(communicator, storages, f"of_rank_{communicator.rank}", 1.0, tag_validation=validation)


def test_tags_that_differ_are_dealt_with_as_configured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storages = [FileStorage(tmp_path)] * 2
    with pytest.raises(CheckpointError) as caught:
        run_threads(2, save_own_tag, storages, "Fail", accelerator=NUMPY)
    assert caught.value.value == ("of_rank_0", "of_rank_1")
    assert all(part in str(caught.value) for part in ("rank 0", "rank 1"))
    assert storages[0].names() == ()

    with caplog.at_level(logging.WARNING):
        run_threads(2, save_own_tag, storages, "Ignore", accelerator=NUMPY)
        assert not caplog.records
        commits = run_threads(2, save_own_tag, storages, "Warn", accelerator=NUMPY)
    assert all("all ranks save under 'of_rank_0'" in record.message for record in caplog.records)
    assert len(caplog.records) == 2
    assert [commit.tag for commit in commits] == ["of_rank_0"] * 2
    assert storages[0].names() == ("latest", "of_rank_0")
    assert value_of(storages[0]) == 1.0


def test_ranks_that_do_not_share_the_directory_are_told(tmp_path: Path) -> None:
    storages = [FileStorage(tmp_path / "host0"), FileStorage(tmp_path / "host1")]
    with pytest.raises(CheckpointError) as caught:
        run_threads(2, save, storages, "t", 1.0, accelerator=NUMPY)
    assert caught.value.value == (0,)
    assert all(part in str(caught.value) for part in ("t/save-0001", "/rank00001.safetensors", "rank 0"))
    assert caught.value.hint.startswith("save to a directory that all hosts share, or to each host's own")


def test_too_little_space_for_all_ranks_together_is_said_before_writing(tmp_path: Path) -> None:
    class SmallStorage(FileStorage):
        def check_space(self, nbytes: int) -> None:
            if nbytes > 150:  # enough for one rank's 40 bytes with padding, not for both
                raise CheckpointError(f"{nbytes} bytes do not fit", hint="free some space")

    with pytest.raises(CheckpointError) as caught:
        run_threads(2, save, [SmallStorage(tmp_path)] * 2, "t", 1.0, accelerator=NUMPY)
    assert caught.value.value == (0,)
    assert all(part in str(caught.value) for part in ("'t'", "rank 0"))
    assert FileStorage(tmp_path).names() == ()


def test_latest_moves_only_when_asked(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)

    def save_beside(communicator: Communicator) -> None:
        save(communicator, [storage], "a", 1.0)
        save(communicator, [storage], "b", 2.0, save_latest=False)

    run_threads(1, save_beside, accelerator=NUMPY)
    assert (tmp_path / "latest").read_text() == "a"
    assert (value_of(storage), value_of(storage, "b")) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("pieces", "named"),
    [
        ([("w", 0, 10, (4, 5))], "'w'"),
        ([("w", 0, 12, (4, 5)), ("w", 8, 12, (4, 5))], "'w'"),
        ([("w", 15, 10, (4, 5))], "'w'"),
        ([("w", 0, 10, (4, 5)), ("w", 10, 10, (5, 4))], "float32"),
    ],
)
def test_pieces_that_could_never_be_loaded_are_not_saved(
    tmp_path: Path, pieces: list[tuple[str, int, int, tuple[int, ...]]], named: str
) -> None:
    def save_pieces(communicator: Communicator) -> None:
        parts = [
            TensorPiece(fqn, "param", shape, DType.FLOAT32, start, allocate_numpy(numel, DType.FLOAT32))
            for fqn, start, numel, shape in pieces
        ]
        save_checkpoint(tmp_path, "t", communicator=communicator, pieces=parts, scalars={}, rank_blobs={})

    with pytest.raises(CheckpointError) as caught:
        run_threads(1, save_pieces, accelerator=NUMPY)
    assert named in str(caught.value)
    assert caught.value.value == (0,)
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_what_cannot_be_saved_on_one_rank_is_an_error_on_all(tmp_path: Path, bad_rank: int) -> None:
    def save_client_state(communicator: Communicator) -> str:
        state: object = {"best": np.float64(1)} if communicator.rank == bad_rank else {"best": 1.0}
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(
                tmp_path,
                "t",
                communicator=communicator,
                pieces=[],
                scalars={"client_state": state},
                rank_blobs={},
            )
        return caught.value.message

    told = run_threads(2, save_client_state, accelerator=NUMPY)
    expected = f"rank {bad_rank}: a checkpoint cannot hold this: scalars.client_state.best is a numpy.float64"
    assert all(expected in message for message in told)
    assert list(tmp_path.iterdir()) == []
