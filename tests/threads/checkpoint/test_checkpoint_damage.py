"""A damaged, torn or missing checkpoint is refused by name, and never loaded in silence."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import (
    CheckpointReader,
    FileStorage,
    TensorPiece,
    list_checkpoints,
    open_checkpoint,
    save_checkpoint,
)
from polyaccel.checkpoint.format import commit, pieces
from polyaccel.comm.backends.local.backend import LocalWorld
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, CommTimeout
from polyaccel.testkit.ranks.threads import run_threads

NUMPY = CpuAccelerator("numpy")
TENSORS = {"a.weight": 20, "b.weight": 33}


def save(communicator: Communicator, place: Path, tag: str) -> None:
    """Two tensors, each cut in the middle between two ranks, and a blob a rank."""
    mine = []
    for fqn, numel in TENSORS.items():
        low, high = communicator.rank * (numel // 2), numel if communicator.rank else numel // 2
        data = NumpyBuffer(np.arange(low, high, dtype=np.float32))
        mine.append(TensorPiece(fqn, "param", (numel,), DType.FLOAT32, low, data))
    save_checkpoint(
        place,
        tag,
        communicator=communicator,
        pieces=mine,
        scalars={"tag": tag},
        rank_blobs={"rng": b"state of %d" % communicator.rank},
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the complete checkpoints step1, step2 and step3, saved in this order; latest is step3."""
    seconds = iter(range(1000, 2000))
    monkeypatch.setattr("polyaccel.checkpoint.save.protocol.time.time", lambda: next(seconds))
    for tag in ("step1", "step3", "step2"):
        run_threads(2, save, tmp_path, tag, accelerator=NUMPY)
    (tmp_path / "latest").write_text("step3")
    return tmp_path


def save_of(place: Path, tag: str) -> Path:
    """The folder of the save that counts."""
    marker = commit.read_commit(FileStorage(place), tag)
    assert marker is not None
    return place / marker.folder


def read_all(reader: CheckpointReader) -> None:
    for fqn, numel in TENSORS.items():
        buffer = allocate_numpy(numel, DType.FLOAT32)
        reader.read_into(fqn, "param", 0, numel, buffer)
        assert buffer.raw.tolist() == list(range(numel))
    for rank in range(2):
        assert reader.rank_blobs(rank) == {"rng": b"state of %d" % rank}


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_byte_in_every_region_of_a_rank_file_is_refused_by_name(place: Path) -> None:
    folder = save_of(place, "step3")
    regions = json.loads((folder / "manifest.json").read_text())
    named = [
        (file, offset, length * 4, f"[{start}, {start + length}) of '{tensor['fqn']}'")
        for tensor in regions["tensors"]
        for start, length, file, offset, _ in tensor["pieces"]
    ]
    for rank, blobs in enumerate(regions["blobs"]):
        file, offset, nbytes, _ = blobs["rng"]
        named.append((file, offset, nbytes, f"'rng' of rank {rank}"))
    assert len(named) == 6
    for file, offset, nbytes, name in named:
        for position in (offset, offset + nbytes // 2, offset + nbytes - 1):
            flip(folder / file, position)
            with pytest.raises(CheckpointError) as caught:
                read_all(open_checkpoint(place))
            assert all(part in str(caught.value) for part in ("step3/save-0001", file, name))
            flip(folder / file, position)
    read_all(open_checkpoint(place))


def test_four_kib_of_0xff_are_refused(tmp_path: Path) -> None:
    def save_large(communicator: Communicator) -> None:
        data = NumpyBuffer(np.ones(8192, dtype=np.float32))
        part = TensorPiece("w", "master", (8192,), DType.FLOAT32, 0, data)
        save_checkpoint(tmp_path, "t", communicator=communicator, pieces=[part], scalars={}, rank_blobs={})

    run_threads(1, save_large, accelerator=NUMPY)
    with open(save_of(tmp_path, "t") / "rank00000.safetensors", "r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 4096)
    buffer = allocate_numpy(100, DType.FLOAT32)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path).read_into("w", "master", 0, 100, buffer)
    assert str(caught.value.value).endswith("rank00000.safetensors")
    assert "'w'" in str(caught.value)
    assert not buffer.raw.any()  # nothing unverified reached the caller's memory


def test_every_flipped_byte_of_manifest_and_marker_is_refused(place: Path) -> None:
    for path in (save_of(place, "step3") / "manifest.json", place / "step3" / "commit.json"):
        for position in range(0, path.stat().st_size, 7):
            flip(path, position)
            with pytest.raises(CheckpointError) as caught:
                open_checkpoint(place)
            assert path.name in str(caught.value)
            flip(path, position)
    read_all(open_checkpoint(place))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:57])


TEARS: list[tuple[str, Callable[[Path], None], str]] = [
    ("save/rank00001.safetensors", truncate, "/rank00001.safetensors"),
    ("save/rank00000.safetensors", Path.unlink, "/rank00000.safetensors"),
    ("save/manifest.json", truncate, "/manifest.json"),
    ("save/manifest.json", Path.unlink, "/manifest.json"),
    ("commit.json", truncate, "step3/commit.json"),
    ("commit.json", Path.unlink, "'step3'"),
]


@pytest.mark.parametrize(("file", "tear", "named"), TEARS, ids=[f"{tear.__name__} {file}" for file, tear, _ in TEARS])
def test_a_torn_latest_is_refused_and_the_complete_tags_are_named(
    place: Path, caplog: pytest.LogCaptureFixture, file: str, tear: Callable[[Path], None], named: str
) -> None:
    tear((save_of(place, "step3") if "/" in file else place / "step3") / Path(file).name)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place)
    assert all(part in str(caught.value) for part in (named, "step2, step1", "step3"))
    assert "tag='step2'" in caught.value.hint
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place, "step3", fallback=True)  # who names a tag gets that tag or an error
    assert named in str(caught.value)

    with caplog.at_level(logging.WARNING):
        reader = open_checkpoint(place, fallback=True)
    assert reader.scalars == {"tag": "step2"}
    assert "loading 'step2', the newest complete checkpoint, instead" in caplog.text
    read_all(reader)


def test_a_missing_latest_is_an_error_that_lists_the_tags(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "latest").unlink()
    (place / "abandoned" / "save-0001").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place)
    assert caught.value.value == str(place)
    assert "'latest'" in str(caught.value)
    assert "complete checkpoints there, newest first: step2, step3, step1; not complete: abandoned" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(place, fallback=True).tag == "step2"
    assert open_checkpoint(place, "step1").tag == "step1"


@pytest.mark.parametrize(
    ("latest", "named"),
    [
        (b"step9", "'step9'"),
        (b"../elsewhere", "'../elsewhere'"),
        (b"\xff\xfe", "'latest'"),
        (b"", "''"),
    ],
)
def test_a_latest_that_names_nothing_is_an_error(place: Path, latest: bytes, named: str) -> None:
    (place / "latest").write_bytes(latest)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place)
    assert named in str(caught.value)
    assert "step2, step3, step1" in str(caught.value)


def test_an_unknown_tag_or_directory_is_an_error(place: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place, "step9")
    assert caught.value.value == "step9"
    assert all(part in str(caught.value) for part in ("step2", "step3", "step1"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place / "none")
    assert str(caught.value.value).endswith("/none")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place / "none", fallback=True)
    assert str(caught.value.value).endswith("/none")
    assert "'latest'" in str(caught.value)


def test_a_renamed_tag_is_refused(place: Path) -> None:
    (place / "step3").rename(place / "best")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place, "best")
    assert caught.value.value == "best"
    assert "'step3'" in str(caught.value)


def test_a_manifest_with_a_hole_is_refused_although_its_checksums_are_right(place: Path) -> None:
    """As a wrong writer might leave it: every byte is the one that was written, but some were never written."""
    path = save_of(place, "step3") / "manifest.json"
    tree = json.loads(path.read_text())
    del tree["tensors"][1]["pieces"][0], tree["digest"]
    data = json.dumps({**tree, "format": [1, 0]}).encode()
    path.write_bytes(data)
    marker = commit.Commit("step3", path.parent.name, len(data), zlib.crc32(data), saved_at_s=1.0)
    (place / "step3" / "commit.json").write_bytes(marker.to_bytes())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place)
    assert caught.value.value == ("b.weight", "param")


def test_the_tags_of_a_directory_are_listed_newest_first(place: Path) -> None:
    truncate(save_of(place, "step3") / "rank00000.safetensors")
    statuses = list_checkpoints(place)
    assert [status.tag for status in statuses] == ["step2", "step3", "step1"]
    assert [bool(status.problem) for status in statuses] == [False, True, False]
    assert list_checkpoints(place / "none") == ()


def open_all(communicator: Communicator, places: list[Path], **options: Any) -> str:
    try:
        return open_checkpoint(places[communicator.rank], communicator=communicator, **options).tag
    except CheckpointError as error:
        return f"error: {error}"


def test_all_ranks_open_what_rank_0_chose(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commit.read_latest
    seen = iter(["step2"])  # a second look, from another host, would see something else
    monkeypatch.setattr(
        "polyaccel.checkpoint.load.reader.read_latest", lambda storage: next(seen, None) or real(storage)
    )
    assert run_threads(3, open_all, [place] * 3, accelerator=NUMPY) == ["step2"] * 3


def test_what_one_rank_cannot_open_no_rank_opens(place: Path, tmp_path: Path) -> None:
    told = run_threads(2, open_all, [place, tmp_path / "elsewhere"], accelerator=NUMPY)
    assert len(set(told)) == 1
    assert re.search(r"failed on rank 1: step3/save-0001-\w+/manifest\.json in", told[0])
    told = run_threads(2, open_all, [tmp_path / "elsewhere", place], accelerator=NUMPY)
    assert len(set(told)) == 1
    assert "opening a checkpoint failed on rank 0" in told[0]


def test_loading_on_one_rank_only_is_detected(place: Path) -> None:
    world = LocalWorld(2, NUMPY, timeout_s=0.2)
    with pytest.raises(CommTimeout) as caught:
        open_checkpoint(place, communicator=world.communicators[1])
    assert caught.value.value == (0,)
    assert "open_checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("a.wieght", "param", 0, 4), ("a.wieght", "param")),
        (("a.weight", "exp_avg", 0, 4), ("a.weight", "exp_avg")),
        (("a.weight", "param", 18, 4), (18, 4)),
        (("a.weight", "param", -1, 4), (-1, 4)),
        (("a.weight", "param", 0, 5), 5),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    place: Path, arguments: tuple[str, str, int, int], value: object
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(place).read_into(*arguments, allocate_numpy(4, DType.FLOAT32))
    assert caught.value.value == value


def test_what_was_saved_can_be_asked(place: Path) -> None:
    reader = open_checkpoint(place)
    assert reader.has("a.weight", "param")
    assert not reader.has("a.weight", "exp_avg")
    assert [(tensor.fqn, tensor.numel) for tensor in reader.tensors()] == list(TENSORS.items())


def test_another_element_type_is_refused_unless_asked_for(place: Path) -> None:
    reader = open_checkpoint(place)
    buffer = allocate_numpy(20, DType.FLOAT16)
    with pytest.raises(CheckpointError) as caught:
        reader.read_into("a.weight", "param", 0, 20, buffer)
    assert all(part in str(caught.value) for part in ("float32", "float16"))
    reader.read_into("a.weight", "param", 0, 20, buffer, cast_through=NUMPY.allocate)
    assert buffer.raw.tolist() == list(range(20))


def test_blobs_of_a_rank_that_did_not_save_are_refused(place: Path) -> None:
    reader = open_checkpoint(place)
    assert reader.world_size == 2
    for rank in (-1, 2):
        with pytest.raises(CheckpointError) as caught:
            reader.rank_blobs(rank)
        assert caught.value.value == rank


def test_memory_is_bounded_however_large_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_NBYTES", 1024)
    largest = {"written": 0, "read": 0}

    class Watched(FileStorage):
        def write(self, path: str, chunks: Any) -> None:
            data = list(chunks)
            largest["written"] = max(
                [largest["written"], *(len(chunk) for chunk in data if path.endswith(".safetensors"))]
            )
            super().write(path, data)

        def read(self, path: str, offset: int, nbytes: int) -> bytes:
            largest["read"] = max(largest["read"], nbytes if path.endswith(".safetensors") else 0)
            return super().read(path, offset, nbytes)

    def save_large(communicator: Communicator) -> None:
        part = TensorPiece("w", "param", (5000,), DType.FLOAT16, 0, allocate_numpy(5000, DType.FLOAT16))
        save_checkpoint(Watched(tmp_path), "t", communicator=communicator, pieces=[part], scalars={}, rank_blobs={})

    run_threads(1, save_large, accelerator=NUMPY)
    reader = open_checkpoint(Watched(tmp_path))
    reader.read_into("w", "param", 0, 5000, allocate_numpy(5000, DType.FLOAT16))
    assert largest == {"written": 1024, "read": 1024}
