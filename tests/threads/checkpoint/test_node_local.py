"""Hosts with disks of their own: each has its part and a neighbour's copy, and any of them may be missing at a load."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import Storage, TensorPiece, list_checkpoints, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.retention import Retention
from polyaccel.checkpoint.save import neighbor_copies
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.storage.node_local import NodeLocalStorage
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

NUMPY = CpuAccelerator("numpy")
NUMEL = 24


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, and not the machine; and copies take several chunks."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(neighbor_copies, "CHUNK_NBYTES", 200)


class Crash(BaseException):
    """The process dies here: nobody catches this."""


class FaultyDisk(NodeLocalStorage):
    """A host's disk whose `at`-th change goes wrong; `changes` counts them."""

    fault, at = "", -1
    changes = 0

    def _change(self, method: Callable[..., None], *args: Any) -> None:
        hit = self.changes == self.at
        self.changes += 1
        if hit and self.fault == "crash before":
            raise Crash
        if hit and self.fault == "error before":
            raise CheckpointError("the disk is on fire", hint="pour water on it")
        method(*args)
        if hit and self.fault == "crash after":
            raise Crash

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._change(super().write, path, chunks)

    def delete(self, path: str) -> None:
        self._change(super().delete, path)

    def delete_tree(self, path: str) -> None:
        self._change(super().delete_tree, path)


def disks(place: Path, *hosts: int) -> list[Storage]:
    """The storage of each rank, which is on the host of that number."""
    return [FaultyDisk(place / f"host{host}") for host in hosts]


def save(communicator: Communicator, storages: list[Storage], tag: str, value: float, **options: Any) -> None:
    numel = NUMEL // communicator.world_size
    data = NumpyBuffer(np.full(numel, value, dtype=np.float32))
    save_checkpoint(
        storages[communicator.rank],
        tag,
        communicator=communicator,
        pieces=[TensorPiece("w", "param", (4, 6), DType.FLOAT32, communicator.rank * numel, data)],
        scalars={"value": value},
        rank_blobs={"rng": f"{value} of {communicator.rank}".encode()},
        **options,
    )


def load(communicator: Communicator, storages: list[Storage], tag: str | None = None, **options: Any) -> float:
    """The one value that every part of a checkpoint holds, read by all ranks together."""
    reader = open_checkpoint(storages[communicator.rank], tag, communicator=communicator, **options)
    buffer = allocate_numpy(NUMEL, DType.FLOAT32)
    with reader.together(communicator, "the load") as reading:
        reader.verify("w", "param", 0, NUMEL, DType.FLOAT32)
        reading.verify("the load")
        reading.load("the load", lambda: reader.read_into("w", "param", 0, NUMEL, buffer))
        blobs = reader.rank_blobs(0)["rng"].split(b" ")
    (value,) = {*buffer.raw.tolist(), reader.scalars["value"], float(blobs[0])}
    return float(value)


def saved(place: Path, hosts: tuple[int, ...], tag: str, value: float) -> None:
    run_threads(len(hosts), save, disks(place, *hosts), tag, value, accelerator=NUMPY)


def loaded(place: Path, hosts: tuple[int, ...], tag: str | None = None) -> float:
    (value,) = set(run_threads(len(hosts), load, disks(place, *hosts), tag, accelerator=NUMPY))
    return float(value)


def names(place: Path, host: int, tag: str) -> list[str]:
    return sorted(path.name for path in place.glob(f"host{host}/{tag}/save-*/*"))


def test_each_host_has_its_part_and_its_neighbours(tmp_path: Path) -> None:
    saved(tmp_path, (0, 0, 1, 2), "t", 1.0)
    own = {0: (0, 1), 1: (2,), 2: (3,)}
    for host in own:
        files = {f"rank{rank:05d}.safetensors" for rank in (*own[host], *own[(host - 1) % 3])}
        leaders = {"manifest.json", "owner.json"}
        assert set(names(tmp_path, host, "t")) == files | leaders
        assert (tmp_path / f"host{host}" / "latest").read_text() == "t"
        assert [status.problem for status in list_checkpoints(tmp_path / f"host{host}")] == [""]
    manifests = {path.read_bytes() for path in tmp_path.rglob("manifest.json")}
    assert len(manifests) == 1
    held = json.loads(manifests.pop())["held"]
    assert [name.endswith("host1") for _, name in held["rank00002.safetensors"]] == [True, False]


def test_any_host_may_be_missing(tmp_path: Path) -> None:
    saved(tmp_path, (0, 0, 1, 2), "t", 1.0)
    for lost in range(3):
        there = tuple(host for host in range(3) if host != lost)
        assert loaded(tmp_path, there) == loaded(tmp_path, (*there, 7)) == 1.0  # 7 is new and has nothing
        assert loaded(tmp_path, (*there, *there, 7, 8)) == 1.0


def test_two_neighbours_that_are_missing_are_named_with_their_files(tmp_path: Path) -> None:
    saved(tmp_path, (0, 1, 2, 3), "t", 1.0)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, (0, 3, 9))
    assert "rank00001.safetensors, which" in caught.value.message
    assert "rank00000" not in caught.value.message
    assert f"{tmp_path}/host1 and " in caught.value.message
    assert f"{tmp_path}/host9" in caught.value.message
    assert "start the job on the hosts that have the files" in caught.value.hint
    assert loaded(tmp_path, (1, 3)) == 1.0  # they are no neighbours


@pytest.mark.parametrize("hosts", [(0,), (1,), (0, 1), (0, 0, 0), (0, 5, 6), (6, 5, 1, 0)])
def test_what_two_hosts_saved_any_hosts_load(hosts: tuple[int, ...], tmp_path: Path) -> None:
    saved(tmp_path, (0, 0, 1, 1), "t", 3.0)
    assert loaded(tmp_path, hosts) == 3.0
    saved(tmp_path, hosts, "again", 4.0)
    assert loaded(tmp_path, hosts) == 4.0


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_is_named_and_taken_from_the_other_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, (0, 1, 2), "t", 1.0)
    piece = open_checkpoint(tmp_path / "host1").tensor("w", "param").pieces[1]
    first, second = (next(tmp_path.glob(f"host{host}/t/*/{piece.file}")) for host in (1, 2))
    flip(first, piece.offset)
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path, (0, 1, 2)) == 1.0
    assert f"{piece.file} in {tmp_path}/host1 is damaged" in caplog.text
    assert "it is taken from" in caplog.text
    flip(second, piece.offset)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, (0, 1, 2))
    assert piece.file in str(caught.value)
    first.unlink()
    flip(second, piece.offset)
    assert loaded(tmp_path, (0, 1, 2)) == 1.0
    assert "lacks" in str(_error(lambda: loaded(tmp_path, (0, 1))))


def _error(action: Callable[[], Any]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        action()
    return caught.value


def changes(place: Path, hosts: tuple[int, ...]) -> list[int]:
    """How many changes each rank makes to its disk when it saves a tag again."""
    storages = disks(place, *hosts)
    saved(place, hosts, "t", 1.0)
    run_threads(len(hosts), save, storages, "t", 2.0, accelerator=NUMPY)
    return [getattr(storage, "changes", 0) for storage in storages]


def faults(place: Path, hosts: tuple[int, ...], kinds: Iterable[str]) -> Iterator[tuple[Path, list[Storage], str]]:
    for rank, count in enumerate(changes(place / "count", hosts)):
        assert count >= 1
        for at in range(count):
            for fault in kinds:
                name = f"{fault} change {at} of rank {rank}"
                folder = place / name.replace(" ", "-")
                saved(folder, hosts, "old", 1.0)
                saved(folder, hosts, "t", 1.0)
                storages = disks(folder, *hosts)
                broken: Any = storages[rank]
                broken.fault, broken.at = fault, at
                yield folder, storages, name


def test_a_crash_at_any_change_leaves_the_old_or_the_new_save_on_any_hosts(tmp_path: Path) -> None:
    """A host that is lost before, between and after the markers; then another is lost too."""
    hosts, outcomes = (0, 1, 2), set()
    kinds = ["crash before", "crash after"] if os.environ.get("TESTS_FAULTS") == "full" else ["crash before"]
    for folder, storages, name in faults(tmp_path, hosts, kinds):
        with pytest.raises(Crash):
            run_threads(3, save, storages, "t", 2.0, accelerator=NUMPY)
        value = loaded(folder, hosts, "t")
        outcomes.add(value)
        assert value in (1.0, 2.0), name
        assert loaded(folder, (0, 1), "t") in (1.0, value), name
        assert loaded(folder, hosts, "old") == 1.0, name
        saved(folder, hosts, "another", 3.0)  # completes the markers, then clears up
        assert {loaded(folder, there, "t") for there in ((0, 1), (1, 2), (2, 0), hosts)} == {value}, name
        assert loaded(folder, hosts) == 3.0
        assert {len(list(folder.glob(f"host{host}/t/save-*"))) for host in (0, 1, 2)} == {1}, name
    assert outcomes == {1.0, 2.0}


def test_a_failure_on_any_host_is_an_error_on_all_and_loses_nothing(tmp_path: Path) -> None:
    def tell(communicator: Communicator, storages: list[Storage]) -> str:
        try:
            save(communicator, storages, "t", 2.0)
        except CheckpointError as error:
            return str(error)
        return ""

    hosts, failures = (0, 1, 1), 0
    for folder, storages, name in faults(tmp_path, hosts, ["error before"]):
        told = run_threads(3, tell, storages, accelerator=NUMPY)
        assert len(set(told)) == 1, (name, told)
        failures += bool(told[0])
        assert not told[0] or "the disk is on fire" in told[0], (name, told)
        assert loaded(folder, hosts, "t") in ((1.0, 2.0) if told[0] else (2.0,)), name
        saved(folder, hosts, "t", 3.0)
        assert loaded(folder, (0,), "t") == loaded(folder, (1,), "t") == 3.0, name
    assert failures >= 8


def test_one_host_has_no_copy_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        saved(tmp_path, (0, 0), "a", 1.0)
        saved(tmp_path, (0, 0), "b", 2.0)
    assert [record.message for record in caplog.records if "second copy" in record.message] == [
        f"all ranks see one storage, {tmp_path}/host0: checkpoints have no second copy on another host"
    ]
    assert "held" not in json.loads(next(tmp_path.glob("host0/b/*/manifest.json")).read_text())
    assert loaded(tmp_path, (0, 0)) == loaded(tmp_path, (0, 3)) == 2.0


def test_the_newest_save_that_can_be_had_is_loaded_where_no_tag_was_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, (0, 1), "both", 1.0)
    saved(tmp_path, (2, 3), "elsewhere", 2.0)
    saved(tmp_path, (0, 2, 3), "newest", 3.0)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, (0, 1))
    assert all(part in str(caught.value) for part in ("'newest'", "rank00001.safetensors"))

    def load_what_there_is(communicator: Communicator) -> float:
        return load(communicator, disks(tmp_path, 0, 1), fallback=True)

    with caplog.at_level(logging.WARNING):
        assert run_threads(2, load_what_there_is, accelerator=NUMPY) == [1.0, 1.0]
    assert "instead" in caplog.text
    assert loaded(tmp_path, (0, 1, 2), "newest") == loaded(tmp_path, (3, 0)) == 3.0


def test_a_cloned_disk_is_found_out(tmp_path: Path) -> None:
    saved(tmp_path, (0,), "t", 1.0)
    (tmp_path / "host1").mkdir()
    (tmp_path / "host1" / "place.json").write_bytes((tmp_path / "host0" / "place.json").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        saved(tmp_path, (0, 1), "u", 1.0)
    assert caught.value.value == (1,)
    assert all(part in str(caught.value) for part in ("host1", "host0"))
    assert "delete place.json" in caught.value.hint
    assert loaded(tmp_path, (0,)) == 1.0


def test_each_host_deletes_old_tags_and_lists_its_own(tmp_path: Path) -> None:
    def save_and_delete(communicator: Communicator, number: int) -> None:
        rule = Retention(keep_last=2)
        save(communicator, disks(tmp_path, 0, 1), f"step{number}", float(number), retention=rule)

    for number in range(3):
        run_threads(2, save_and_delete, number, accelerator=NUMPY)
    for host in (0, 1):
        assert [(each.tag, each.problem) for each in list_checkpoints(tmp_path / f"host{host}")] == [
            ("step2", ""),
            ("step1", ""),
        ]
    next(tmp_path.glob("host1/step2/*/rank00000.safetensors")).unlink()  # the copy
    assert [bool(each.problem) for each in list_checkpoints(tmp_path / "host1")] == [True, False]


def test_one_hosts_folder_alone_says_what_is_elsewhere(tmp_path: Path) -> None:
    saved(tmp_path, (0, 1, 2), "t", 1.0)
    reader = open_checkpoint(tmp_path / "host0")
    with pytest.raises(CheckpointError) as caught:
        reader.read_into("w", "param", 0, NUMEL, allocate_numpy(NUMEL, DType.FLOAT32))
    assert str(caught.value.value).endswith("rank00001.safetensors")
    assert "host0" in str(caught.value)
    assert f"{tmp_path}/host1" in caught.value.hint


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_every_rank_sends_one_copy_to_the_next_place(of_rank: list[int]) -> None:
    order = {place: number for number, place in enumerate(dict.fromkeys(of_rank))}
    places = StorageNodes(tuple(order[place] for place in of_rank), ("",) * len(order), ("",) * len(order))
    turns = neighbor_copies.copy_turns(places)
    senders = [rank for turn in turns for rank in turn]
    assert sorted(senders) == (list(range(len(of_rank))) if places.count > 1 else [])
    for turn in turns:
        assert len(set(turn.values())) == len(turn)
        for sender, taker in turn.items():
            assert places.of_rank[taker] == places.neighbour(places.of_rank[sender]) != places.of_rank[sender]


def test_verify_reads_what_is_on_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, (0, 1, 2), "t", 1.0)
    assert main(["ckpt", "verify", str(tmp_path / "host0")]) == 0
    assert "t: whole; 80 B in" in capsys.readouterr().out
    piece = open_checkpoint(tmp_path / "host0").tensor("w", "param").pieces[2]  # of rank 2: a copy
    flip(next(tmp_path.glob(f"host0/t/*/{piece.file}")), piece.offset)
    assert main(["ckpt", "verify", str(tmp_path / "host0")]) == 1
    assert "on other hosts" in capsys.readouterr().out
