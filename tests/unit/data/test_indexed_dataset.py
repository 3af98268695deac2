"""Token files: written bytes by the format's description, and read back."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyaccel.data import IndexedDataset, IndexedDatasetBuilder
from polyaccel.data.indexed_dataset import fitting_dtype
from polyaccel.errors import PolyaccelError

KINDS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "int32", **named: Any) -> None:
    with IndexedDatasetBuilder(prefix, dtype, **named) as builder:
        for document in documents:
            for sequence in document:
                builder.add_item(sequence)
            builder.end_document()


def index_by_hand(documents: list[list[list[int]]], code: int, itemsize: int) -> bytes:
    """The index as Megatron-LM describes it, field by field."""
    sizes = [len(sequence) for document in documents for sequence in document]
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + len(document))
    places = [itemsize * sum(sizes[:number]) for number in range(len(sizes))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(ends))
    return head + struct.pack(f"<{len(sizes)}i{len(places)}q{len(ends)}q", *sizes, *places, *ends)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=3), max_size=4), st.sampled_from(KINDS))
def test_files_have_the_formats_bytes(tmp_path: Path, documents: list[list[list[int]]], dtype: str) -> None:
    write(tmp_path / "data", documents, dtype)
    flat = [token for document in documents for sequence in document for token in sequence]
    assert (tmp_path / "data.bin").read_bytes() == np.array(flat, dtype).tobytes()
    code = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 6, "uint32": 7, "uint64": 8}[dtype]
    wanted = index_by_hand(documents, code, np.dtype(dtype).itemsize)
    assert (tmp_path / "data.idx").read_bytes() == wanted
    found = IndexedDataset(tmp_path / "data")
    assert [one.tolist() for one in found[:]] == [sequence for document in documents for sequence in document]
    assert [found.document(number).tolist() for number in range(found.num_documents)] == [
        [token for sequence in document for token in sequence] for document in documents
    ]
    assert not flat or found.dtype == dtype


def test_parts_are_read_only_views(tmp_path: Path) -> None:
    write(tmp_path / "data", [[[1, 2, 3, 4]], [[5, 6], []]])
    data = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "data")))
    assert data.get(0, 1, 2).tolist() == [2, 3]
    assert data[-2].tolist() == [5, 6]
    assert data[::-1][0].tolist() == []
    assert data.sizes.tolist() == [4, 2, 0]
    assert not data[0].flags.writeable
    for number in (3, -4):
        with pytest.raises(IndexError):
            data[number]
    with pytest.raises(IndexError):
        data.get(0, 3, 2)


@pytest.mark.parametrize(("dtype", "code"), [("uint16", 8), ("float64", 6)])
def test_megatrons_numbers_of_types_are_known_by_the_size(tmp_path: Path, dtype: str, code: int) -> None:
    write(tmp_path / "data", [[[1, 2, 3]]], dtype, written_by="megatron")
    assert (tmp_path / "data.idx").read_bytes()[17] == code
    assert IndexedDataset(tmp_path / "data").dtype == dtype


def test_the_ambiguous_number_is_deepspeeds_unless_told(tmp_path: Path) -> None:
    write(tmp_path / "data", [[[1, 2, 3]]], "float32", written_by="megatron")
    assert IndexedDataset(tmp_path / "data").dtype == "uint32"
    assert IndexedDataset(tmp_path / "data", written_by="megatron")[0].tolist() == [1.0, 2.0, 3.0]


def test_files_are_merged(tmp_path: Path) -> None:
    write(tmp_path / "one", [[[1, 2]], [[3], [4]]])
    write(tmp_path / "two", [[[5, 6]]])
    with IndexedDatasetBuilder(tmp_path / "both") as builder:
        builder.merge(tmp_path / "one")
        builder.merge(tmp_path / "two")
    write(tmp_path / "whole", [[[1, 2]], [[3], [4]], [[5, 6]]])
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"both{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
    with pytest.raises(PolyaccelError) as caught, IndexedDatasetBuilder(tmp_path / "other", "uint8") as builder:
        builder.merge(tmp_path / "one")
    assert caught.value.value == "int32"
    assert not IndexedDataset.exists(tmp_path / "other")
    assert not (tmp_path / "other.bin").exists()


def test_bad_files_and_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolyaccelError):
        IndexedDataset(tmp_path / "none")
    with IndexedDatasetBuilder(tmp_path / "data", "uint8") as builder, pytest.raises(PolyaccelError):
        builder.add_item([256])
    with pytest.raises(PolyaccelError):
        builder.add_item([1])
    with pytest.raises(PolyaccelError):
        IndexedDatasetBuilder(tmp_path / "half", "float16")
    write(tmp_path / "data", [[[1, 2, 3]]])
    whole = {ending: (tmp_path / f"data{ending}").read_bytes() for ending in (".bin", ".idx")}
    for ending, cut in ((".bin", -1), (".idx", -1), (".idx", 3), (".bin", 0)):
        (tmp_path / f"data{ending}").write_bytes(whole[ending][:cut])
        with pytest.raises(PolyaccelError):
            IndexedDataset(tmp_path / "data")
        (tmp_path / f"data{ending}").write_bytes(whole[ending])
    assert len(IndexedDataset(tmp_path / "data")) == 1


def test_sequences_that_no_index_can_describe_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", "uint8") as builder, pytest.raises(PolyaccelError):
        builder.add_item(np.broadcast_to(np.uint8(0), 2**31))
    for place, number in ((1, 3), (3, 7)):  # sizes -1 and 4; borders 0, 7, 2
        write(tmp_path / "data", [[[1, 2]], [[3]]])
        index = bytearray((tmp_path / "data.idx").read_bytes())
        at = 34 + 4 * (place - 1) if place < 3 else 34 + 24 + 8
        index[at : at + 8] = struct.pack("<ii", number + 1, -1) if place < 3 else struct.pack("<q", number)
        (tmp_path / "data.idx").write_bytes(index)
        with pytest.raises(PolyaccelError):
            IndexedDataset(tmp_path / "data")


def test_a_file_in_another_order_is_merged_by_its_places(tmp_path: Path) -> None:
    write(tmp_path / "data", [[[1, 2], [3, 4]]])
    index = bytearray((tmp_path / "data.idx").read_bytes())
    index[34 + 8 : 34 + 24] = struct.pack("<qq", 8, 0)
    (tmp_path / "data.idx").write_bytes(index)
    with IndexedDatasetBuilder(tmp_path / "merged") as builder:
        builder.merge(tmp_path / "data")
    assert [one.tolist() for one in IndexedDataset(tmp_path / "merged")] == [[3, 4], [1, 2]]


def test_places_have_64_bits(tmp_path: Path) -> None:
    """Files of 4 GiB with a hole."""
    size = 2**31 - 1
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 3, 2)
    (tmp_path / "data.idx").write_bytes(index + struct.pack("<3i3q2q", size, size, 2, 0, size, 2 * size, 0, 3))
    with open(tmp_path / "data.bin", "wb") as data:
        data.seek(2 * size)
        data.write(b"\x05\x06")
    assert IndexedDataset(tmp_path / "data")[2].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("least", "most", "dtype"),
    [(0, 255, "uint8"), (0, 256, "uint16"), (-1, 127, "int8"), (-1, 128, "int16"), (0, 2**40, "uint64")],
)
def test_the_narrowest_type_is_found(least: int, most: int, dtype: str) -> None:
    assert fitting_dtype(least, most) == dtype
