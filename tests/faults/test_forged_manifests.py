"""Manifests, commit markers and `latest` with other contents than ours: refused by name, or the same numbers."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fault_table import IS_FULL, TABLE, Ends
from forging import COUNT, forged, garbled, random_of
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import Commit, FileStorage, TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.format.commit import read_commit, read_latest, write_commit
from polyaccel.checkpoint.format.manifest import Manifest
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

TENSORS = {("a", "param"): 20, ("a", "exp_avg"): 20, ("b", "param"): 33, ("empty", "param"): 0}
REFUSED = Ends("a CheckpointError that names the file", "the same numbers, or refused")
SCALARS = {"counters": {"steps": 3}, "betas": (0.9, 0.95), "seed": 2**70, "raw": b"\0\1", "worst": float("inf")}


def values(kind: str, numel: int) -> np.ndarray[Any, Any]:
    return np.arange(numel, dtype=np.float32) + (100 if kind == "param" else 0)


def save(communicator: Any, place: Path) -> None:
    pieces = []
    for (fqn, kind), numel in TENSORS.items():
        low, high = communicator.rank * (numel // 2), numel if communicator.rank else numel // 2
        data = NumpyBuffer(values(kind, numel)[low:high].copy())
        pieces.append(TensorPiece(fqn, kind, (numel,), data.dtype, low, data))
    blobs = {"rng": b"state of %d" % communicator.rank}
    save_checkpoint(place, "t", communicator=communicator, pieces=pieces, scalars=SCALARS, rank_blobs=blobs)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoint `t`."""
    folder = tmp_path_factory.mktemp("forged")
    run_threads(2, save, folder, accelerator=CpuAccelerator("numpy"))
    return folder


@pytest.fixture(scope="module")
def original(place: Path) -> bytes:
    commit = read_commit(FileStorage(place), "t")
    assert commit is not None
    return (place / commit.folder / "manifest.json").read_bytes()


def dumped(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode("ascii")


def sealed(tree: Any) -> bytes:
    """A forged manifest whose digest was made anew."""
    if not isinstance(tree, dict):
        return dumped(tree)
    body = {key: value for key, value in tree.items() if key != "digest"}
    return dumped({**body, "digest": sha256(dumped(body)).hexdigest()})


def install(place: Path, manifest: bytes) -> None:
    """Put a manifest in the place of the checkpoint's, with the right length and checksum in the marker."""
    commit = read_commit(FileStorage(place), "t")
    assert commit is not None
    (place / commit.folder / "manifest.json").write_bytes(manifest)
    write_commit(FileStorage(place), Commit("t", commit.save, len(manifest), zlib.crc32(manifest), 1.0))


def read_everything(place: Path) -> None:
    """Every number of the checkpoint is the one that was saved, or it is refused."""
    with suppress(CheckpointError):
        reader = open_checkpoint(place, "t")
        for (fqn, kind), numel in TENSORS.items():
            buffer = allocate_numpy(numel, NumpyBuffer(values(kind, 1)).dtype)
            reader.read_into(fqn, kind, 0, numel, buffer, cast_through=allocate_numpy)
            assert buffer.raw.tolist() == values(kind, numel).tolist()
        assert reader.scalars == SCALARS
        assert [reader.rank_blobs(rank)["rng"] for rank in range(2)] == [b"state of 0", b"state of 1"]


@settings(max_examples=3000 if IS_FULL else 150, derandomize=True, database=None)
@given(st.randoms(use_true_random=False))
def test_a_manifest_that_was_changed_gives_the_same_numbers_or_none(
    place: Path, original: bytes, random: Random
) -> None:
    changed = dumped(forged(json.loads(original), random))
    with TABLE.case("a manifest with other contents and right checksums", REFUSED):
        install(place, changed)
        read_everything(place)


def test_the_undamaged_manifest_gives_all_numbers(place: Path, original: bytes) -> None:
    install(place, original)
    reader = open_checkpoint(place, "t")
    assert {(each.fqn, each.kind): each.numel for each in reader.tensors()} == TENSORS
    read_everything(place)


def test_no_manifest_is_a_traceback(original: bytes) -> None:
    """Also with a digest that was made anew: then what is taken is at least a whole manifest."""
    random, tree, taken = random_of(11), json.loads(original), 0
    with TABLE.case(
        "forged manifests, parsed", Ends("a CheckpointError that names the file", "a whole manifest, or refused")
    ):
        for at in range(COUNT):
            data = garbled(original, random) if at % 4 == 0 else sealed(forged(tree, random))
            try:
                manifest = Manifest.from_json(data)
                manifest.check()
            except CheckpointError:
                continue
            taken += 1
            again = manifest.to_json()
            assert Manifest.from_json(again).to_json() == again
    assert taken < COUNT


def test_no_marker_is_a_traceback() -> None:
    random = random_of(12)
    marker = Commit("t", "save-0001", 1234, 5678, 1e9).to_bytes()
    tree = json.loads(marker.partition(b"\n")[0])
    with TABLE.case(
        "forged commit markers, parsed",
        Ends("a CheckpointError that names the file", "a marker as ours are, or refused"),
    ):
        for at in range(COUNT):
            body = garbled(marker, random) if at % 4 == 0 else dumped(forged(tree, random))
            try:
                commit = Commit.from_bytes(body + b"\n%08x\n" % zlib.crc32(body), "t/commit.json")
            except CheckpointError:
                continue
            assert type(commit.tag) is str
            assert Commit.from_bytes(commit.to_bytes(), "again") == commit


def test_no_latest_is_a_traceback(tmp_path: Path) -> None:
    random, storage = random_of(13), FileStorage(tmp_path)
    with TABLE.case("garbage in latest", Ends("a CheckpointError that names the file", "a tag, or refused")):
        for _ in range(COUNT // 10):
            (tmp_path / "latest").write_bytes(garbled(b"global_step100", random))
            try:
                tag = read_latest(storage)
            except CheckpointError:
                continue
            assert tag
            assert not set(tag) & set("/\\")
