"""The manifest round-trips, and one whose pieces do not tile every tensor is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.checkpoint.commit import Commit, check_tag
from polyaccel.checkpoint.manifest import BlobEntry, Manifest, Piece, TensorEntry, build_tensors
from polyaccel.errors import CheckpointError
from polyaccel.types import DType

FILES = {"rank00000.bin": 1000, "rank00001.bin": 1000}


def entry(*runs: tuple[int, int], shape: tuple[int, ...] = (4, 5)) -> TensorEntry:
    pieces = tuple(Piece(start, length, "rank00000.bin", 0, 0) for start, length in runs)
    return TensorEntry("layer.weight", "exp_avg", shape, DType.FLOAT32, pieces)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    tensors = []
    for index in range(draw(st.integers(0, 4))):
        cuts = sorted({0, 20, *draw(st.lists(st.integers(1, 19), max_size=5))})
        pieces = tuple(
            Piece(
                low, high - low, draw(st.sampled_from(sorted(FILES))), draw(st.integers(0, 800)), draw(st.integers(0))
            )
            for low, high in pairwise(cuts)
        )
        tensors.append(TensorEntry(f"p{index}", "param", (20,), draw(st.sampled_from(list(DType))), pieces))
    blobs = ((BlobEntry("rng", "rank00000.bin", 64, 5, 77),), ())
    return Manifest("step1", 2, FILES, tuple(tensors), {"lr": draw(st.floats(allow_nan=False))}, blobs)


@given(manifests())
def test_a_manifest_round_trips_and_holds(manifest: Manifest) -> None:
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    again.check()


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5))
def test_pieces_pass_exactly_when_each_element_is_in_one(runs: list[tuple[int, int]]) -> None:
    tensor = entry(*sorted(runs), shape=(10,))
    covered = sorted(element for start, length in runs for element in range(start, start + length))
    if covered == list(range(10)) and all(length for _, length in runs):
        tensor.check_tiling()
    else:
        with pytest.raises(CheckpointError, match=r"'layer\.weight' \(exp_avg\)"):
            tensor.check_tiling()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (entry((0, 8), (12, 8)), r"misses elements \[8, 12\) of 'layer\.weight' \(exp_avg\)"),
        (entry((0, 12), (8, 12)), r"holds elements \[8, 12\) twice of 'layer\.weight'"),
        (entry((0, 8)), r"misses elements \[8, 20\)"),
        (entry(), r"misses elements \[0, 20\)"),
        (entry((0, 24)), r"holds elements \[20, 24\), which its shape \(4, 5\) has not"),
        (entry((0, 1), shape=(0, 3)), r"holds elements \[0, 1\)"),
    ],
)
def test_a_gap_or_an_overlap_is_named(tensor: TensorEntry, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest("t", 1, FILES, (tensor,)).check()


def test_empty_and_scalar_tensors_are_tiled() -> None:
    Manifest("t", 1, FILES, (entry(shape=(0, 3)), replace(entry((0, 1), shape=()), fqn="scale"))).check()


def test_a_piece_outside_its_file_is_refused() -> None:
    piece = Piece(0, 20, "rank00001.bin", 960, 0)
    with pytest.raises(CheckpointError, match=r"bytes \[960, 1040\) of rank00001\.bin, .*'layer\.weight'"):
        Manifest("t", 2, FILES, (replace(entry(), pieces=(piece,)),)).check()
    with pytest.raises(CheckpointError, match=r"of rank00007\.bin, which should hold 'rng' of rank 0"):
        Manifest("t", 1, FILES, (), {}, ((BlobEntry("rng", "rank00007.bin", 0, 1, 0),),)).check()


def test_a_tensor_listed_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match="lists a tensor twice"):
        Manifest("t", 1, FILES, (entry((0, 20)), entry((0, 20)))).check()


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"is float32\[4, 5\] on rank 0 but float32\[5, 4\] on rank 2"):
        build_tensors([(0, entry((0, 10))), (2, entry((10, 10), shape=(5, 4)))])


def test_a_newer_minor_is_read_and_another_major_is_not() -> None:
    tree = json.loads(Manifest("t", 1, FILES, (entry((0, 20)),)).to_json())
    newer = {**tree, "format": [1, 9], "what_a_later_version_adds": {}}
    assert Manifest.from_json(json.dumps(newer).encode()).tensors == (entry((0, 20)),)
    with pytest.raises(CheckpointError, match=r"has format \[2, 0\], this version of polyaccel reads 1\.x"):
        Manifest.from_json(json.dumps({**tree, "format": [2, 0]}).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":[1,0]}', b"\xff\xff"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be understood"):
        Manifest.from_json(data)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_marker_with_any_flipped_bit_is_refused(position: int, bit: int) -> None:
    data = bytearray(Commit("step1", "save-0001", 1234, 5678, 1e9).to_bytes())
    assert Commit.from_bytes(bytes(data), "x") == Commit("step1", "save-0001", 1234, 5678, 1e9)
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CheckpointError, match=r"step1/commit\.json is damaged"):
        Commit.from_bytes(bytes(data), "step1/commit.json")


@pytest.mark.parametrize("tag", ["", "latest", ".hidden", "..", "a/b", "a\\b", "a\nb", " a", "C:", 7, None])
def test_an_impossible_tag_is_refused(tag: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be a checkpoint's tag"):
        check_tag(tag)


@pytest.mark.parametrize("tag", ["global_step10", "épreuve 3", "a.b-c", "2026-11-20"])
def test_a_usual_tag_is_accepted(tag: str) -> None:
    assert check_tag(tag) == tag
