"""The manifest round-trips, and one whose pieces do not tile every tensor is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.checkpoint.format.commit import Commit, check_tag
from polyaccel.checkpoint.format.manifest import BlobEntry, Manifest
from polyaccel.checkpoint.format.tensors import Piece, TensorEntry, build_tensors
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

FILES = {"rank00000.safetensors": 1000, "rank00001.safetensors": 1000}


def with_digest(tree: dict[str, Any]) -> bytes:
    """A manifest of that content, as a writer with other ideas would leave it."""
    plain = json.dumps(tree, separators=(",", ":"))
    return json.dumps({**tree, "digest": sha256(plain.encode()).hexdigest()}, separators=(",", ":")).encode()


def entry(*runs: tuple[int, int], shape: tuple[int, ...] = (4, 5)) -> TensorEntry:
    pieces = tuple(Piece(start, length, "rank00000.safetensors", 0, 0) for start, length in runs)
    return TensorEntry("layer.weight", "exp_avg", shape, DType.FLOAT32, pieces)


CRC32 = st.integers(0, 2**32 - 1)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    tensors = []
    for index in range(draw(st.integers(0, 4))):
        cuts = sorted({0, 20, *draw(st.lists(st.integers(1, 19), max_size=5))})
        pieces = tuple(
            Piece(low, high - low, draw(st.sampled_from(sorted(FILES))), 160 * index + 8 * low, draw(CRC32))
            for low, high in pairwise(cuts)
        )
        tensors.append(TensorEntry(f"p{index}", "param", (20,), draw(st.sampled_from(list(DType))), pieces))
    blobs = ((BlobEntry("rng", "rank00000.safetensors", 900, 5, 77),), ())
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
        with pytest.raises(CheckpointError) as caught:
            tensor.check_tiling()
        assert caught.value.value == ("layer.weight", "exp_avg")
        assert "(exp_avg)" in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (entry((0, 8), (12, 8)), "(exp_avg)"),
        (entry((0, 12), (8, 12)), "'layer.weight'"),
        (entry((0, 8)), "'layer.weight'"),
        (entry(), "'layer.weight'"),
        (entry((0, 24)), "'layer.weight'"),
        (entry((0, 1), shape=(0, 3)), "'layer.weight'"),
    ],
)
def test_a_gap_or_an_overlap_is_named(tensor: TensorEntry, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 1, FILES, (tensor,), {}, ((),)).check()
    assert named in str(caught.value)
    assert caught.value.value == ("layer.weight", "exp_avg")


def test_empty_and_scalar_tensors_are_tiled() -> None:
    tensors = (entry(shape=(0, 3)), replace(entry((0, 1), shape=()), fqn="scale"))
    Manifest("t", 1, FILES, tensors, {}, ((),)).check()


def test_a_piece_outside_its_file_is_refused() -> None:
    piece = Piece(0, 20, "rank00001.safetensors", 960, 0)
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 1, FILES, (replace(entry(), pieces=(piece,)),), {}, ((),)).check()
    assert caught.value.value == "rank00001.safetensors"
    assert "'layer.weight'" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 1, FILES, (), {}, ((BlobEntry("rng", "rank00007.safetensors", 0, 1, 0),),)).check()
    assert caught.value.value == "rank00007.safetensors"
    assert all(part in str(caught.value) for part in ("'rng'", "rank 0"))


def test_a_tensor_listed_twice_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 1, FILES, (entry((0, 20)), entry((0, 20))), {}, ((),)).check()
    assert caught.value.value == "t"


def test_bytes_that_two_should_hold_are_refused() -> None:
    other = replace(entry((0, 20)), fqn="layer.bias")
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 1, FILES, (entry((0, 20)), other), {}, ((),)).check()
    assert caught.value.value == "rank00000.safetensors"
    assert all(part in str(caught.value) for part in ("'layer.bias'", "(exp_avg)", "'layer.weight'"))
    repeated = (Piece(0, 10, "rank00000.safetensors", 0, 0), Piece(10, 10, "rank00000.safetensors", 0, 0))
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 1, FILES, (replace(entry(), pieces=repeated),), {}, ((),)).check()
    assert caught.value.value == "rank00000.safetensors"


def test_kinds_of_other_shapes_and_other_numbers_of_ranks_are_refused() -> None:
    other = replace(entry(shape=(0, 3)), kind="param")
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 1, FILES, (entry((0, 20)), other), {}, ((),)).check()
    assert caught.value.value == "layer.weight"
    assert "exp_avg" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        Manifest("t", 2, FILES, (), {}, ((),)).check()
    assert caught.value.value == "t"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("tensors", 0, "pieces", 0, 2), 7, "tensors.0.pieces.0.2"),
        (("tensors", 0, "pieces", 0, 2), "../x", "tensors.0.pieces.0.2"),
        (("tensors", 0, "pieces", 0), [0, 20], "tensors.0.pieces.0.2"),
        (("tensors", 0, "pieces", 0, 0), True, "tensors.0.pieces.0.0"),
        (("tensors", 0, "pieces", 0, 3), -1, "tensors.0.pieces.0.3"),
        (("tensors", 0, "shape"), "45", "tensors.0.shape"),
        (("tensors", 0, "dtype"), "float31", "tensors.0.dtype"),
        (("tensors", 0, "kind"), None, "tensors.0.kind"),
        (("files",), [], "the manifest"),
        (("world_size",), "1", "world_size"),
        (("blobs", 0), {"rng": 5}, "blobs.0.rng"),
        (("scalars",), {"$tuple": 5}, "'$tuple'"),
        (("scalars",), {"$int": "z"}, "'$int'"),
        (("scalars",), {"$tuple": []}, "the manifest"),
    ],
)
def test_a_forged_value_is_refused_by_its_place(path: tuple[Any, ...], value: Any, named: str) -> None:
    tree = json.loads(Manifest("t", 1, FILES, (entry((0, 20)),), {}, ((),)).to_json())
    del tree["digest"]
    place = tree
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(with_digest(tree))
    assert named in str(caught.value)


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        build_tensors([(0, entry((0, 10))), (2, entry((10, 10), shape=(5, 4)))])
    assert caught.value.value == "layer.weight"
    assert all(part in str(caught.value) for part in ("float32", "rank 0", "rank 2"))


def test_a_newer_minor_is_read_and_another_major_is_not() -> None:
    tree = json.loads(Manifest("t", 1, FILES, (entry((0, 20)),)).to_json())
    del tree["digest"]
    newer = with_digest({**tree, "format": [2, 9], "what_a_later_version_adds": {}})
    assert Manifest.from_json(newer).tensors == (entry((0, 20)),)
    older = json.dumps({**tree, "format": [1, 0]}).encode()
    assert Manifest.from_json(older).tensors == (entry((0, 20)),)
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(json.dumps(tree).encode())
    assert caught.value.value == "the manifest"
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(json.dumps({**tree, "format": [3, 0]}).encode())
    assert caught.value.value == [3, 0]
    assert all(part in str(caught.value) for part in ("1.x", "2.x"))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":[1,0]}', b"\xff\xff"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(data)
    assert caught.value.value == "the manifest"


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_marker_with_any_flipped_bit_is_refused(position: int, bit: int) -> None:
    data = bytearray(Commit("step1", "save-0001", 1234, 5678, 1e9).to_bytes())
    assert Commit.from_bytes(bytes(data), "x") == Commit("step1", "save-0001", 1234, 5678, 1e9)
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CheckpointError) as caught:
        Commit.from_bytes(bytes(data), "step1/commit.json")
    assert caught.value.value == "step1/commit.json"


@pytest.mark.parametrize("tag", ["", "latest", ".hidden", "..", "a/b", "a\\b", "a\nb", " a", "C:", 7, None])
def test_an_impossible_tag_is_refused(tag: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_tag(tag)
    assert caught.value.value == tag


@pytest.mark.parametrize("tag", ["global_step10", "épreuve 3", "a.b-c", "2026-11-20"])
def test_a_usual_tag_is_accepted(tag: str) -> None:
    assert check_tag(tag) == tag
